"""Tiny random FP8 and NVFP4 checkpoints in published formats, and the same weights in bfloat16.

Real files rather than vLLM's dummy weights: those are drawn from ±1e-3, which FP8 rounds to almost
nothing, and then any two kernels agree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, DENSE, EXPERT, EXPERTS, TOP_K, LAYERS = 512, 1024, 256, 8, 2, 2
HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 8, 2, 64, 512
BLOCK = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the largest float8_e4m3fn
FP4_MAX = 6.0
GROUP = 16  # values that share an NVFP4 scale
FP4 = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
)  # e2m1, by its three low bits
SHAPES = ("dense", "moe")
SCALINGS = ("tensor", "block", "nvfp4")


def write_checkpoints(folder: Path, seed: int = 0) -> None:
    """``dense-tensor``, ``moe-block`` and so on, each with a ``-bf16`` twin beside it."""
    for shape in SHAPES:
        for scaling in SCALINGS:
            packed, twin = {}, {}
            for name, weight in _weights(shape, torch.Generator().manual_seed(seed)):
                if name.endswith("_proj.weight"):
                    stored, twin[name] = QUANTISERS[scaling](weight)
                    layer = name.removesuffix("weight")
                    packed |= {layer + key: tensor for key, tensor in stored.items()}
                else:
                    packed[name] = twin[name] = weight
            _save(folder / f"{shape}-{scaling}", packed, _config(shape, scaling))
            _save(folder / f"{shape}-{scaling}-bf16", twin, _config(shape, None))


Quantised = tuple[
    dict[str, torch.Tensor], torch.Tensor
]  # what is stored, what it stands for


def per_tensor(weight: torch.Tensor) -> Quantised:
    """FP8 values and one float32 scale."""
    scale = weight.abs().max() / FP8_MAX
    stored = (weight / scale).to(FP8)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def per_block(weight: torch.Tensor) -> Quantised:
    """FP8 values and a float32 scale per block of 128 by 128."""
    rows, columns = (size // BLOCK for size in weight.shape)
    blocks = weight.view(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)) / FP8_MAX
    stored = (blocks / scales[:, None, :, None]).view_as(weight).to(FP8)
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return {"weight": stored, "weight_scale_inv": scales}, stored.float() * wide


def nvfp4(weight: torch.Tensor) -> Quantised:
    """Pairs of FP4 values, the even one in the low half; FP8 scales per 16; a scale for all.

    The outer scale is the same everywhere, because layers that vLLM fuses must share it.
    """
    outer = torch.tensor(1.0 / (FP4_MAX * FP8_MAX))
    groups = weight.view(weight.shape[0], -1, GROUP)
    inner = (groups.abs().amax(2) / FP4_MAX / outer).to(FP8)
    scales = (inner.float() * outer)[:, :, None]
    # A group of zeros has a scale of zero.
    scaled = (groups / scales.clamp_min(1e-12)).view_as(weight)
    nearest = (scaled.abs()[..., None] - FP4).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8)
    values = FP4[nearest] * torch.where(scaled < 0, -1.0, 1.0)
    stored = {
        "weight": codes[:, 0::2] | (codes[:, 1::2] << 4),
        "weight_scale": inner,
        "weight_scale_2": outer,
        "input_scale": torch.tensor(8.0 / (FP4_MAX * FP8_MAX)),
    }
    return stored, (values.view_as(groups) * scales).view_as(weight)


QUANTISERS = {"tensor": per_tensor, "block": per_block, "nvfp4": nvfp4}


def _weights(
    shape: str, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    def draw(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (
            torch.randn(rows, columns, generator=generator) * gain / math.sqrt(columns)
        )

    yield (
        "model.embed_tokens.weight",
        torch.randn(VOCABULARY, HIDDEN, generator=generator),
    )
    # Logits with a spread of 3: neither flat nor one-hot.
    yield "lm_head.weight", draw(VOCABULARY, HIDDEN, 3.0)
    yield "model.norm.weight", torch.ones(HIDDEN)
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", torch.ones(HIDDEN)
        for norm in ("q_norm", "k_norm"):
            yield f"{layer}.self_attn.{norm}.weight", torch.ones(HEAD_DIM)
        yield f"{layer}.self_attn.q_proj.weight", draw(HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.k_proj.weight", draw(KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.v_proj.weight", draw(KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", draw(HIDDEN, HEADS * HEAD_DIM)
        blocks, width = [f"{layer}.mlp"], DENSE
        if shape == "moe":
            yield f"{layer}.mlp.gate.weight", draw(EXPERTS, HIDDEN, 3.0)
            blocks, width = [f"{layer}.mlp.experts.{i}" for i in range(EXPERTS)], EXPERT
        for block in blocks:
            yield f"{block}.gate_proj.weight", draw(width, HIDDEN)
            yield f"{block}.up_proj.weight", draw(width, HIDDEN)
            yield f"{block}.down_proj.weight", draw(HIDDEN, width, 2.0)


def _config(shape: str, scaling: str | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [
            "Qwen3MoeForCausalLM" if shape == "moe" else "Qwen3ForCausalLM"
        ],
        "model_type": "qwen3_moe" if shape == "moe" else "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if shape == "moe":
        config |= {
            "moe_intermediate_size": EXPERT,
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    skipped = ["lm_head"]
    if shape == "moe":
        skipped += [f"model.layers.{number}.mlp.gate" for number in range(LAYERS)]
    if scaling == "nvfp4":
        config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": GROUP,
            "ignore": skipped,
        }
    elif scaling:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "modules_to_not_convert": skipped,
            **({"weight_block_size": [BLOCK, BLOCK]} if scaling == "block" else {}),
        }
    return config


def _save(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    scales = ("scale", "scale_inv", "scale_2")
    whole = {
        # Weights that are not quantised are bfloat16; scales and packed values stay as they are.
        name: (
            tensor.bfloat16()
            if tensor.dtype == torch.float32 and not name.endswith(scales)
            else tensor
        ).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
