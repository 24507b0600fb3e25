"""Say what FlashInfer compiles at a first start, by release and model."""

from dataclasses import replace

import pytest

from patchkit.runtime.host.host import FlashInfer
from patchkit.runtime.rules.presets import load_flag_rules
from patchkit.runtime.rules.rule import is_met, load_variable_rules
from patchkit.runtime.serve.args import serve_args
from patchkit.runtime.serve.command_notes import MODULES, first_start_notes
from tools import serve_lines

MOE = "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4"
BLOCKS = "Qwen/Qwen3.6-27B-FP8"
SINKS = "openai/gpt-oss-120b"
EXPERTS = "sampling, fused_moe_120, fp4_gemm_cutlass_sm120, batch_prefill"
SINK = "sampling, batch_prefill_with_attention_sink, the same for windows, xqa, xqa for windows"


FACTS = {"nvcc": "/usr/bin/nvcc", "ninja": "/usr/bin/ninja"}


def notes(model, vllm="0.33.0", kernels=None, **asked):
    request = serve_lines.request(vllm, {"model": model, **asked})
    request = replace(request, node=replace(request.node, kernels=kernels))
    command = serve_args(request, load_flag_rules())
    told = list(first_start_notes(request.node, command.modules))
    assert all(note in command.notes for note in told)
    return told


@pytest.mark.parametrize(
    ("model", "vllm", "compiled"),
    [
        (MOE, "0.25.1", f"{EXPERTS}; 126 units, up to 10.4"),
        (
            MOE,
            "0.28.0",
            f"{EXPERTS}, xqa; 129 units, up to 10.4",
        ),
        (
            MOE,
            "0.33.0",
            f"{EXPERTS}, xqa; 129 units, up to 10.4",
        ),
        (BLOCKS, "0.25.1", "sampling; 3 units, up to 1.0"),
        (BLOCKS, "0.33.0", "sampling; 3 units, up to 1.0"),
        (SINKS, "0.25.1", "sampling; 3 units, up to 1.0"),
        (SINKS, "0.28.0", f"{SINK}; 29 units, up to 1.0"),
        (SINKS, "0.33.0", f"{SINK}; 29 units, up to 1.0"),
        ("Qwen/Qwen3.5-35B-A3B", "0.28.0", "sampling, fused_moe_120; 99 units"),
        ("RedHatAI/gemma-4-26B-A4B-it-FP8-dynamic", "0.33.0", "sampling; 3 units"),
    ],
)
def test_modules_of_presets(model, vllm, compiled):
    (told,) = notes(model, vllm)
    assert f"if an earlier one did not: {compiled}" in told


@pytest.mark.parametrize(
    ("model", "vllm", "asked"),
    [
        (MOE, "0.24.0", {}),
        (MOE, "0.34.0", {}),
        ("RadixArk/Qwen3.8-Flash-Next-NVFP4", "0.33.0", serve_lines.TWO),
        (SINKS, "0.33.0", {"target": "h200"}),
    ],
)
def test_silence_about_what_nobody_read(model, vllm, asked):
    assert notes(model, vllm, **asked) == []


@pytest.mark.parametrize(
    ("model", "asked", "gap"),
    [
        (BLOCKS, {}, "gemm_sm120 and gemm, 31 units, if one scale"),
        ("some/model", {}, "what its experts and quantized layers take"),
        ("some/model", {"quantization": "bf16"}, "fused_moe_120, 96 units"),
    ],
)
def test_gaps_are_said(model, asked, gap):
    (told,) = notes(model, **asked)
    assert f"; not in it: {gap}" in told


def test_what_is_there_is_not_compiled():
    swa = "batch_prefill_with_attention_sink_kv_cache_dtype_q_bf16_dtype_kv_e4m3_dtype_o_bf16_"
    swa += "dtype_idx_i32_head_dim_qk_64_head_dim_vo_64_use_swa_{}_"
    xqa = "xqa_input_bf16_kv_cache_e4m3_output_bf16_page_size_16_head_dim_64_head_group_ratio_8_"
    xqa += "use_sliding_window_{}_use_spec_dec_False_spec_q_seq_len_1"
    there = [name.format(window) for name in (swa, xqa) for window in (True, False)]
    kernels = FlashInfer(version="", modules=tuple(there), facts=FACTS)

    (told,) = notes(SINKS, kernels=kernels)
    assert "at the first start: sampling; 3 units, up to 1.0 GiB" in told
    everything = replace(kernels, modules=(*there, "sampling"))
    assert notes(SINKS, kernels=everything) == []


@pytest.mark.parametrize(
    ("vllm", "facts", "said"),
    [
        ("0.28.0", {"ninja": "n", "toolkit": "t"}, "nvcc is not on PATH"),
        ("0.28.0", {"cubin": "1"}, ""),
        ("0.33.0", {"ninja": "n", "toolkit": "t"}, ""),
        ("0.33.0", {"ninja": "n"}, "there is no nvcc"),
        ("0.33.0", {"nvcc": "n"}, "ninja is not on PATH"),
        ("0.33.0", {"cubin": "0.7.2"}, ""),
        ("0.33.0", {**FACTS, "prebuilt": "other-version"}, "of another version"),
        ("0.33.0", {**FACTS, "prebuilt": "other-arch"}, "FLASHINFER_CUDA_ARCH_LIST"),
    ],
)
def test_what_keeps_kernels_from_use(vllm, facts, said):
    kernels = FlashInfer(version="", modules=("sampling",), facts=facts)
    told = notes(BLOCKS, vllm, kernels)
    assert [said in note and "; instead: " in note for note in told] == [True] * bool(
        said
    )


def test_jobs_are_those_of_env_files():
    (rule,) = (row for row in load_variable_rules().rules if row.id == "compile-limits")
    assert rule.set["MAX_JOBS"] == str(MODULES.jobs)

    # Where FlashInfer asks memory itself, no variable does.
    kernels = FlashInfer(version="", modules=(), facts={**FACTS, "jobs": "memory"})
    (told,) = notes(BLOCKS, kernels=kernels)
    assert "with 4 at once, and as many run as memory holds" in told
    node = serve_lines.request("0.33.0", {"model": BLOCKS}).node
    assert is_met(rule.when, node.situation)
    assert not is_met(rule.when, replace(node, kernels=kernels).situation)
