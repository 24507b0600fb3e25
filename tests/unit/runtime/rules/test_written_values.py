"""Each value that rules and presets write is one that the release takes: by the table, in all."""

from __future__ import annotations

from itertools import chain

import pytest

from patchkit.runtime.rules.flags import load_flag_rules
from patchkit.runtime.rules.presets import load_presets
from patchkit.runtime.rules.releases import within
from patchkit.runtime.rules.variable_rules import load_variable_rules
from patchkit.runtime.rules.variable_values import vllm_values
from patchkit.runtime.rules.variables import vllm_variables
from support.selection import SUPPORTED

RULES = load_variable_rules()


def in_release(entry, version):
    return within(version, str(entry.when.get("vllm", "")))


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_release_takes_what_is_written_for_it(version):
    known, values = vllm_variables(version), vllm_values(version)
    written = [
        (rule.id, name, value)
        for rule in RULES.rules
        if in_release(rule, version)
        for name, value in rule.set.items()
    ]
    written += [
        (preset.id, name, value)
        for preset in load_presets()
        if within(version, f">={preset.min_vllm}")
        for name, value in preset.variables.items()
    ]
    ours = [each for each in written if each[1].startswith("VLLM_") and "{" not in each[2]]
    # A preset lasts longer than its variables: `env` refuses what the release does not read.
    ours = [each for each in ours if each[1] in known or "/" not in each[0]]
    assert ours
    wrong = [each for each in ours if each[1] not in known]
    wrong += [(i, name, value) for i, name, value in ours if not _takes(values, name, value)]
    assert not wrong


def _takes(values, name, value):
    return name not in values or values[name].has(value)


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_rule_about_quantized_layers_says_where_they_go(version):
    """So that the test of routes asks the release about it."""
    rules = [*RULES.rules, *load_flag_rules().rules]
    chooses = ("MARLIN", "GEMM", "KERNELS", "BACKEND", "-backend")
    silent = [
        rule.id
        for rule in rules
        if "quantization" in rule.when and in_release(rule, version)
        if any(word in str(rule) for word in chooses)
        if not any(within(version, way.partition(" ")[2]) for way in chain(*rule.routes.values()))
    ]
    # No stand-in answers for the package b12x, which neither vLLM's wheel nor torch's brings.
    assert [name for name in silent if not name.startswith("b12x")] == []
