"""Compute the most tokens per second for one stream, by what a token reads of the weights."""

import json
import os

import pytest

from patchkit.errors import UsageError
from patchkit.runtime.memory.checkpoint import find_checkpoint
from patchkit.runtime.rules.presets import named_preset
from patchkit.runtime.rules.rule import RuleChoice
from support.hub import checkpoint
from tools.serve_lines import TWO, served

# Bytes by config.json: attention with biases and router, experts that are taken, head.
GPT = (
    36 * (2880 * 9344 + 42560) * 2 + 36 * 4 * 3 * 2880**2 * 4.25 / 8 + 201088 * 2880 * 2
)
QWEN = 80 * (8192 * 18432 + 3 * 8192 * 29568) * 2 + 152064 * 8192 * 2
MIXTRAL = 32 * (4096 * 10240 + 2 * 3 * 4096 * 14336 + 4096 * 8) * 2 + 32000 * 4096 * 2


def qwen_next(layers, experts, taken):
    """Return weights besides the head: a quarter with attention, GDN, shared expert, router."""
    attention, linear = (
        2048 * (2 * 4096 + 2 * 512 + 4096),
        2048 * (4096 + 2 * 4096 + 64 + 4096),
    )
    each = 3 * 2048 * 512 * (taken + 1) + 2048 * (experts + 1)
    return (
        layers // 4 * attention + layers * 3 // 4 * (linear + 4 * 8192) + layers * each
    )


NEXT = qwen_next(48, 512, 10) + 151936 * 2048 * 2  # in FP8, all but the head
QWEN35 = (qwen_next(40, 256, 8) + 248320 * 2048) * 2


def test_presets_read_what_their_configs_say():
    for model, reads, asked, said in (
        (
            "openai/gpt-oss-120b",
            GPT,
            TWO,
            "109 tok/s for one stream on 2 nodes: at least 5 ",
        ),
        (
            "Qwen/Qwen2.5-72B-Instruct",
            QWEN,
            TWO | {"topology": "socket"},
            "1.91 tok/s for one",
        ),
        (
            "mistralai/Mixtral-8x7B-Instruct-v0.1",
            MIXTRAL,
            {},
            "10.7 tok/s for one stream on one",
        ),
        (
            "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8",
            NEXT,
            {},
            "71.8 tok/s for one stream on one",
        ),
        (
            "Qwen/Qwen3.5-35B-A3B",
            QWEN35,
            {},
            "47.1 tok/s for one stream on one node: at least 5.8",
        ),
    ):
        assert (
            0 <= reads / 1e9 - named_preset(model).reads_gb < 0.1
        )  # the least: the most tokens
        assert f"at most {said}" in " ".join(
            served("0.33.0", {"model": model, **asked}).notes
        )


def test_a_checkpoint_says_what_a_token_reads(tmp_path):
    layers, moe = {"num_hidden_layers": 1}, {"num_experts": 8, "num_experts_per_tok": 2}
    sizes = {
        "embed_tokens.a": 1000,
        "layers.0.experts.0.a": 400,
        "layers.0.shared_experts.a": 50,
    }
    sizes |= {"__metadata__": 1, "layers.1.experts.0.a": 9000, "visual.blocks.0.a": 500}
    for head, config, expected in (
        ({"lm_head.a": 7}, {"text_config": layers | moe}, 100 + 50 + 7),
        ({}, layers | moe, 1000 + 100 + 50),  # the table is the head
        ({}, layers, None),  # nobody says how many of the experts are taken
        ({}, layers | moe | {"architectures": 5}, None),
    ):
        header = {
            name: {"data_offsets": [5, 5 + size]}
            for name, size in (sizes | head).items()
        }
        found = checkpoint(tmp_path, header, config)
        assert (found and round(found.reads)) == expected
    (tmp_path / "model.safetensors").rename(
        tmp_path / "model-00001-of-00002.safetensors"
    )
    assert find_checkpoint(str(tmp_path), {}) is None  # the rest is still to come


@pytest.mark.parametrize(
    "offsets", [[9, 5], [0, 1 << 70], [0, 1.5], ["0", "5"], [True, False], []]
)
def test_a_tensor_of_no_size_is_no_checkpoint(tmp_path, offsets):
    header = {"lm_head.weight": {"data_offsets": offsets}}
    assert checkpoint(tmp_path, header, {"num_hidden_layers": 1}) is None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_never_ends_is_no_checkpoint(tmp_path, name):
    header = {"lm_head.weight": {"data_offsets": [0, 5]}}
    assert checkpoint(tmp_path, header, {"num_hidden_layers": 1})
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert find_checkpoint(str(tmp_path), {}) is None


def test_rules_take_what_a_checkpoint_says(tmp_path):
    config = {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 1,
        "linear_key": 1,
    }
    config |= {"num_experts": 8, "num_experts_per_tok": 2}
    attention = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
    names = {
        **dict.fromkeys([*attention, "lm_head.weight"], "BF16"),
        "mtp.fc.weight": "BF16",
    }
    header = {
        name: {"dtype": dtype, "shape": [9600, 9600], "data_offsets": [0, 2 * 10**8]}
        for name, dtype in {**names, "model.layers.0.mlp.experts.w": "U8"}.items()
    }
    own = checkpoint(tmp_path, header, config)
    here = {"model": "nvidia/Qwen3.6-27B-NVFP4", "checkpoint": own, "stacks": "/s"}
    assert '--watchdog-config {"dump_dir":"/s","timeout":300}' in " ".join(
        served("0.33.0", here).words
    )
    asked = here | {
        "choice": RuleChoice(wanted=frozenset({"dense-8bit", "draft-head-8bit"}))
    }
    told = served("0.33.0", asked)
    flags = {flag.flag: flag for flag in told.flags}
    drafting = json.loads(flags["--speculative-config"].value)
    assert drafting["draft_lm_head_quantization"] == "fp8"
    assert drafting["num_speculative_tokens"] == 5
    assert (
        "each token reads 0.662 GB instead of 1.05."
        in flags["--quantization-config"].reason
    )
    assert any("0.662 GB of weights are read" in note for note in told.limits)
    header["lm_head.weight_scale"] = header["lm_head.weight"]
    for vllm, its in (
        ("0.32.0", own),
        ("0.33.0", checkpoint(tmp_path, header, config)),
    ):
        with pytest.raises(
            UsageError, match="--with draft-head-8bit would change nothing here"
        ):
            served(vllm, asked | {"checkpoint": its})
