"""Presets and the rules about flags: read strictly, found by name, and consistent."""

from itertools import chain

import pytest

from patchkit.errors import UsageError
from patchkit.records import read_toml
from patchkit.runtime.memory.budget import load_budget
from patchkit.runtime.rules import presets
from patchkit.runtime.rules.presets import find_preset, load_flag_rules, load_presets
from patchkit.runtime.rules.releases import read_env_data, within
from patchkit.runtime.rules.rule import load_variable_rules
from support.selection import SUPPORTED

PRESET = """
[[preset]]
id = "a/b"
quantization = "fp8"
moe = false
single = true
nodes = 1
min_vllm = "0.20.0"
source = "x"
evidence = "read"
confidence = "high"
"""


def test_the_presets():
    rules = load_flag_rules()
    always = {
        rule.flag for rule in rules.leave_out if not rule.when and not rule.values
    }
    assert len(load_presets()) == 68
    size = load_budget().size
    for preset in load_presets():
        share = min(float(preset.flags.get("--gpu-memory-utilization", 0.8)), 0.85)
        room = share * size.total_gib - size.margin_gib
        if preset.weights_gib is not None:
            assert preset.single == (preset.weights_gib <= room), preset.id
            assert preset.weights_gib / preset.nodes <= room, preset.id
        given = {flag for flag, value in preset.flags.items() if value is not False}
        given.discard("--speculative-config")  # of the rule `drafter`
        assert given <= set(rules.preset), preset.id  # each has a reason
        assert not always & set(preset.flags), preset.id


def test_found_by_name():
    for model, found in (
        ("openai/gpt-oss-120b", "openai/gpt-oss-120b"),
        ("GPT-OSS-120B", "openai/gpt-oss-120b"),
        ("/models/gpt-oss-120b/", "openai/gpt-oss-120b"),
        ("anybody/GLM-5.3-Flash-NVFP4", "GLM-5.3-Flash-NVFP4"),
        ("somebody/gpt-oss-120b", None),
        ("nvidia/Qwen3.8-Flash-Next-NVFP4", "nvidia/Qwen3.8-Flash-Next-NVFP4"),
        ("Qwen3.8-Flash-Next-NVFP4", None),
    ):
        preset = find_preset(model)
        assert (preset.id if preset else None) == found


def test_what_means_nothing(tmp_path):
    place, rules = tmp_path / "presets.toml", tmp_path / "flags.toml"
    for text, what in (
        (PRESET + 'speed = "fast"\n', "presets.toml: preset[1].speed: unknown key"),
        (
            PRESET.replace('source = "x"\n', ""),
            "toml: preset[1]: lacks the key 'source'",
        ),
        (
            PRESET.replace("fp8", "fp7"),
            "toml: preset[1].quantization: is 'fp7', not one of",
        ),
        (
            PRESET + 'flags = { max_model_len = "1" }\n',
            "'max_model_len', not a flag, written as",
        ),
    ):
        place.write_text(text)
        with pytest.raises(UsageError) as caught:
            read_toml(tuple[presets.Preset, ...], place, key="preset")
        assert what in str(caught.value)
    text = presets.RULES.read_text(encoding="utf-8")
    for old, new, what in (
        (
            'topology = "socket", nodes',
            'topology = "pigeon", nodes',
            "'pigeon' means nothing",
        ),
        (
            'flag = "--headless"',
            'flag = "headless"',
            "'headless', not a flag, written as --a-flag",
        ),
        (
            'confidence = "high"',
            'confidence = "total"',
            "[1].confidence: is 'total', not one of",
        ),
        ("\n[preset]", "\n[preseet]", "flags.toml: preseet: unknown key"),
    ):
        assert old in text
        rules.write_text(text.replace(old, new, 1))
        with pytest.raises(UsageError) as caught:
            read_toml(presets.FlagRules, rules)
        assert what in str(caught.value)


def test_no_two_entries_have_one_name():
    names = [preset.id.lower() for preset in load_presets()]
    about_flags, about_variables = load_flag_rules(), load_variable_rules()
    rules = (
        *about_flags.rules,
        *about_flags.leave_out,
        *about_flags.advice,
    )
    of_flags = [entry.id for entry in rules]
    of_variables = [
        entry.id for entry in (*about_variables.entries, *about_variables.advice)
    ]
    for found in (names, of_flags, of_variables):
        assert len({*found}) == len(found)


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_rule_about_quantized_layers_says_where_they_go(version):
    rules = [*load_variable_rules().rules, *load_flag_rules().rules]
    chooses = ("MARLIN", "GEMM", "KERNELS", "BACKEND", "-backend")
    silent = [
        rule.id
        for rule in rules
        if "quantization" in rule.when
        and within(version, str(rule.when.get("vllm", "")))
        if any(word in str(rule) for word in chooses)
        if not any(
            within(version, way.partition(" ")[2])
            for way in chain(*rule.routes.values())
        )
    ]
    # No stand-in answers for the package b12x, which neither vLLM's wheel nor torch's brings.
    assert [name for name in silent if not name.startswith("b12x")] == []


def test_no_preset_takes_a_larger_share_of_the_memory_than_check_allows():
    row = read_env_data("findings")["gpu-memory-utilization-high"]
    shares = [preset.flags.get(row["flag"]) or 0 for preset in load_presets()]
    assert 0 < max(map(float, shares)) <= row["most"]
