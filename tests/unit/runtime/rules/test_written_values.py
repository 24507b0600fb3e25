"""Each rule about quantized layers says where they go, so that the test of routes asks for it."""

from __future__ import annotations

from itertools import chain

import pytest

from patchkit.runtime.rules.flags import load_flag_rules
from patchkit.runtime.rules.releases import within
from patchkit.runtime.rules.variable_rules import load_variable_rules
from support.selection import SUPPORTED

RULES = load_variable_rules()


def in_release(entry, version):
    return within(version, str(entry.when.get("vllm", "")))


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_rule_about_quantized_layers_says_where_they_go(version):
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
