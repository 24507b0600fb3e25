"""Presets and the rules about flags: read strictly, found by name, and consistent."""

from __future__ import annotations

import pytest

from patchkit.errors import UsageError
from patchkit.runtime.rules import flag_rules, presets
from patchkit.runtime.rules.flag_rules import load_flag_rules
from patchkit.runtime.rules.presets import find, load_presets

PRESET = """
[[preset]]
id = "a/b"
quantization = "fp8"
moe = false
single = true
nodes = 1
gpu_memory_utilization = 0.5
max_model_len = 10
min_vllm = "0.20.0"
source = "x"
evidence = "read"
confidence = "high"
"""


def test_there_are_thirty_four():
    assert len(load_presets()) == 34
    assert [each.id for each in load_presets() if each.needs_token] == [
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.1-70B-Instruct",
        "google/gemma-2-27b-it",
    ]


@pytest.mark.parametrize("preset", load_presets(), ids=lambda each: each.name)
def test_a_preset_fits_where_it_says(preset):
    memory = load_flag_rules().memory
    room = preset.gpu_memory_utilization * memory.total_gib - memory.margin_gib
    if preset.weights_gib is not None:
        assert preset.single == (preset.weights_gib <= room)
        assert preset.weights_gib / preset.nodes <= room
    assert preset.gpu_memory_utilization <= 0.85


@pytest.mark.parametrize("preset", load_presets(), ids=lambda each: each.name)
def test_a_preset_sets_nothing_without_a_reason(preset):
    rules = load_flag_rules()
    assert {flag for flag, value in preset.flags.items() if value is not False} <= set(rules.preset)
    always = {rule.flag for rule in rules.leave_out if not rule.when and not rule.values}
    assert not always & set(preset.flags)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("openai/gpt-oss-120b", "openai/gpt-oss-120b"),
        ("GPT-OSS-120B", "openai/gpt-oss-120b"),
        ("/models/gpt-oss-120b/", "openai/gpt-oss-120b"),
        ("./gpt-oss-120b", "openai/gpt-oss-120b"),
        ("anybody/GLM-5.3-Flash-NVFP4", "GLM-5.3-Flash-NVFP4"),
        ("somebody/gpt-oss-120b", None),
        ("gpt-oss", None),
    ],
)
def test_found_by_name(model, found):
    preset = find(model)
    assert (preset.id if preset else None) == found


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (PRESET + 'speed = "fast"\n', "presets.toml:14: preset[1].speed: unknown key"),
        (
            PRESET.replace('source = "x"\n', ""),
            "presets.toml:2: preset[1]: lacks the key 'source'",
        ),
        (
            PRESET.replace("fp8", "fp7"),
            "presets.toml:4: preset[1].quantization: is 'fp7', not one of",
        ),
        (
            PRESET.replace('"read"', '"rumour"'),
            "presets.toml:12: preset[1].evidence: is 'rumour', not one of",
        ),
        (PRESET.replace("0.5", "50"), "gpu_memory_utilization is a share below 1"),
        (
            PRESET + 'flags = { max_model_len = "1" }\n',
            "preset[1].flags.max_model_len: is 'max_model_len', not a flag, written as",
        ),
        (
            PRESET.replace("0.20.0", "new"),
            "presets.toml:10: preset[1].min_vllm: 'new' is not a version",
        ),
        (PRESET + PRESET, "there twice: b"),
        ("[models]\n", "models: unknown key"),
    ],
)
def test_presets_that_mean_nothing(text, what, tmp_path):
    place = tmp_path / "presets.toml"
    place.write_text(text)
    with pytest.raises(UsageError) as caught:
        presets.load_presets(place)
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('id = "headless"', 'id = "nodes"', "there twice: nodes"),
        ('topology = "socket", nodes', 'topology = "pigeon", nodes', "'pigeon' means nothing"),
        (
            'flag = "--headless"',
            'flag = "headless"',
            ".flag: is 'headless', not a flag, written as --a-flag",
        ),
        (
            'confidence = "high"',
            'confidence = "total"',
            "rule[1].confidence: is 'total', not one of",
        ),
        ("\n[memory]", "\n[menory]", "flags.toml:18: menory: unknown key"),
        ("margin_gib", "margin", "memory.margin: unknown key"),
    ],
)
def test_rules_that_mean_nothing(old, new, what, tmp_path):
    text = flag_rules.PLACE.read_text(encoding="utf-8")
    assert old in text
    place = tmp_path / "flags.toml"
    place.write_text(text.replace(old, new, 1))
    with pytest.raises(UsageError) as caught:
        flag_rules.load_flag_rules(place)
    assert what in str(caught.value)


def test_what_rests_on_one_report_is_off():
    off = {rule.id: rule.default for rule in load_flag_rules().rules if not rule.optional}
    assert [name for name, default in off.items() if not default] == [
        "batched-tokens-slow",
        "batched-tokens-four",
    ]
