"""Upstream's recipes, as each release has them, compared with the presets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from patchkit.runtime.rules.flags import load_flag_rules
from patchkit.runtime.rules.presets import find, load_presets
from tools.model_recipes import Difference, differences, recipe_of, recipe_releases, undecided


def test_presets_are_as_each_releases_recipes_or_say_why():
    for release in recipe_releases():
        assert not [each.says for each in undecided(release)]
        compared = [each.id for each in load_presets() if recipe_of(each, release)]
        assert len(compared) >= 14
        assert "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4" in compared


def test_what_a_preset_drops_without_a_word_is_told():
    for changes, told in (
        ({"variables": {}}, ("VLLM_FLOAT32_MATMUL_PRECISION", None, "high")),
        ({"min_vllm": "0.28.0"}, ("min_vllm", "0.28.0", "0.17.1")),
        ({"gpu_memory_utilization": 0.7}, ("--gpu-memory-utilization", "0.70", "0.8")),
        ({"max_model_len": 1}, ("--max-model-len", "1", "262144")),
    ):
        preset = find("NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4")
        found = list(differences(replace(preset, **changes), recipe_of(preset)))
        common = load_flag_rules().recipe
        unsaid = [each for each in found if not each.reason(preset, common)]
        assert unsaid == [Difference(name=told[0], preset=told[1], recipe=told[2])]


def test_weights_follow_from_the_memory_that_is_asked_for():
    recipe = recipe_of(find("nvidia/Qwen3.6-35B-A3B-NVFP4"))
    assert recipe.weights_gib == pytest.approx(21 / 1.5 * 1e9 / 2**30)
    sizes = [
        (preset.weights_gib, recipe.weights_gib)
        for preset in load_presets()
        if preset.weights_gib and (recipe := recipe_of(preset)) and recipe.weights_gib
    ]
    assert len(sizes) >= 14
    # An estimate that is too large would refuse what fits.
    assert all(0.5 * ours <= theirs <= ours for ours, theirs in sizes)
