"""Upstream's recipes: read from a tree, and compared with the presets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from patchkit.runtime.rules.flags import load_flag_rules
from patchkit.runtime.rules.presets import find, load_presets
from tools.model_recipes import (
    Difference,
    differences,
    read_recipes,
    recipe_of,
    recipe_releases,
    undecided,
)

TUNED = """
meta: {hardware: {h100: verified, dgx_spark_gb10: verified}}
model:
  model_id: a/big
  min_vllm_version: "0.20.0"
  base_args: ["--trust-remote-code", "--max-num-seqs", "4", "--host", "0.0.0.0"]
  base_env: {BASE: "1", NCCL_IB_HCA: x}
features:
  tools: {args: ["--tool_call_parser=x"], env: {TOOLS: "1"}}
  long: {args: ["--max-model-len", "1000000"]}
  spec_decoding:
    default_mode: one
    modes:
      one: {args: [--none]}
      two:
        args: [--speculative-config, '{"n":1}']
        hardware_overrides:
          dgx_spark_gb10: {args: ["--speculative-config.n", "5", "--speculative-config.m=x"]}
opt_in_features: [long, spec_decoding]
variants:
  default: {precision: bf16}
  small:
    model_id: a/small
    min_vllm_version: "0.28.0"
    default_modes: {spec_decoding: two}
    vram_minimum_gb: 30
    extra_args: ["--kv-cache-dtype", "fp8"]
    hardware_overrides:
      h100: {extra_args: ["--never"]}
      dgx_spark_gb10: {extra_args: ["--max-num-seqs", "8", "--fast"], extra_env: {DEV: $DEV}}
  again: {model_id: a/small, min_vllm_version: "0.30.0"}
"""
WHOLE = """
meta: {hardware: {dgx_spark_gb10: verified}}
model: {model_id: b/one, base_args: ["--dtype", "bfloat16"]}
variants: {default: {}}
"""
GUIDE = """
meta: {hardware: {dgx_spark_gb10: verified}}
model: {model_id: c/bf16, min_vllm_version: "0.17.1", base_args: ["--x"]}
variants: {default: {}, four: {model_id: c/four}}
guide: |
  ## Everywhere
  ```bash
  vllm serve c/four --not-this
  ```
  ### DGX Spark (GB10)
  It fits:
  ```bash
  # the image
  PRECISION="high" LONG=1 \\
  vllm serve c/four \\
      --host 0.0.0.0 --port 8000 \\
      --share 0.8 \\
      --spec '{"n": 3}' --on
  ```
  ### RTX
  ```bash
  vllm serve c/bf16 --not-this
  ```
"""


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (
            TUNED,
            {
                "a/small": "0.28.0",
                "a/small vram_minimum_gb": "30",
                "a/small --trust-remote-code": "",
                "a/small --max-num-seqs": "8",
                "a/small BASE": "1",
                "a/small --tool-call-parser": "x",
                "a/small TOOLS": "1",
                "a/small --speculative-config": '{"n": 5, "m": "x"}',
                "a/small --kv-cache-dtype": "fp8",
                "a/small --fast": "",
                "a/big": "0.20.0",
            },
        ),
        (WHOLE, {"b/one": "", "b/one --dtype": "bfloat16"}),
        (
            GUIDE,
            {
                "c/four": "0.17.1",
                "c/four PRECISION": "high",
                "c/four LONG": "1",
                "c/four --share": "0.8",
                "c/four --spec": '{"n": 3}',
                "c/four --on": "",
                "c/bf16": "0.17.1",
            },
        ),
    ],
    ids=["tuned", "whole", "guide"],
)
def test_a_recipe_is_read(tmp_path, text, rows):
    place = tmp_path / "recipes/models/owner"
    place.mkdir(parents=True)
    (place / "name.yaml").write_text(text)
    assert read_recipes(tmp_path) == rows


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
