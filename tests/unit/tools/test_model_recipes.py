"""Upstream's recipes, as each release has them: what serve-args makes of them, and presets."""

from dataclasses import replace

import pytest

from patchkit.runtime.rules.presets import (
    find_preset,
    find_recipe,
    load_presets,
    model_recipes,
    same_value,
)
from tools import model_recipes as tool
from tools import serve_lines
from tools.vllm_recipe import merge_settings, split_flags

FOR_GB10 = {name: each for name, each in model_recipes().items() if each.settings}


def test_all_recipes_that_name_the_gb10_are_read():
    assert len({each.about["file"] for each in FOR_GB10.values()}) == 17
    assert len(FOR_GB10) == 42


@pytest.mark.parametrize("name", FOR_GB10)
def test_a_command_is_as_the_recipe_or_says_why(name):
    recipe, preset = FOR_GB10[name], find_preset(name)
    served = serve_lines.served_by_recipe(recipe.id)
    given = merge_settings(split_flags(served.words[3:])) | dict(preset.variables)
    reasons = {
        each.flag: each.reason for each in served.left_out if each.origin == "recipe"
    }
    for setting, value in recipe.settings.items():
        assert same_value(given.get(setting), value) or reasons[setting], setting


def test_presets_are_as_each_releases_recipes_or_say_why():
    for release in tool.recipe_releases():
        assert not [each.says for each in tool.undecided(release)]


def test_what_a_preset_drops_without_a_word_is_told(monkeypatch):
    preset = find_preset("NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4")
    for changes, told in (
        ({"variables": {}}, "VLLM_FLOAT32_MATMUL_PRECISION is 'high' in"),
        ({"min_vllm": "0.28.0"}, "min_vllm is '0.17.1' in"),
        (
            {"flags": {**preset.flags, "--max-model-len": "1"}},
            "--max-model-len is '262144' in",
        ),
    ):
        presets = (replace(preset, **changes),)
        monkeypatch.setattr(tool, "load_presets", lambda presets=presets: presets)
        (unsaid,) = tool.undecided("0.33.0")
        assert told in unsaid.says


def test_weights_follow_from_the_memory_that_is_asked_for():
    recipe = find_recipe("nvidia/Qwen3.6-35B-A3B-NVFP4")
    assert recipe.weights_gib == pytest.approx(21 / 1.5 * 1e9 / 2**30)
    sizes = [
        (preset.weights_gib, recipe.weights_gib)
        for preset in load_presets()
        if preset.weights_gib
        and (recipe := find_recipe(preset.id))
        and recipe.weights_gib
    ]
    assert len(sizes) >= 14
    # An estimate that is too large would refuse what fits.
    assert all(0.5 * ours <= theirs <= ours for ours, theirs in sizes)
