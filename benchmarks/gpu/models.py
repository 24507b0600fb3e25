"""Tiny random FP8 checkpoints in the published formats, and the same weights in bfloat16.

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
SHAPES = ("dense", "moe")
SCALINGS = ("tensor", "block")


def write_checkpoints(folder: Path, seed: int = 0) -> None:
    """``dense-tensor``, ``moe-block`` and so on, each with a ``-bf16`` twin beside it."""
    for shape in SHAPES:
        for scaling in SCALINGS:
            weights = dict(_weights(shape, torch.Generator().manual_seed(seed)))
            linear = {name for name in weights if _is_quantised(name)}
            fp8: dict[str, torch.Tensor] = {}
            twin: dict[str, torch.Tensor] = {}
            for name, weight in weights.items():
                if name not in linear:
                    fp8[name] = twin[name] = weight.bfloat16()
                    continue
                stored, scale = quantised(weight, scaling)
                fp8[name] = stored
                fp8[name + ("_scale_inv" if scaling == "block" else "_scale")] = scale
                twin[name] = dequantised(stored, scale, scaling).bfloat16()
            _save(folder / f"{shape}-{scaling}", fp8, _config(shape, scaling))
            _save(folder / f"{shape}-{scaling}-bf16", twin, _config(shape, None))


def quantised(weight: torch.Tensor, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values and their float32 scales: one scale, or one per block of 128 by 128."""
    if scaling == "tensor":
        scale = weight.abs().max() / FP8_MAX
        return (weight / scale).to(FP8), scale
    rows, columns = (size // BLOCK for size in weight.shape)
    blocks = weight.view(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)) / FP8_MAX
    return (blocks / scales[:, None, :, None]).view_as(weight).to(FP8), scales


def dequantised(stored: torch.Tensor, scale: torch.Tensor, scaling: str) -> torch.Tensor:
    """What the FP8 values stand for, in float32."""
    if scaling == "tensor":
        return stored.float() * scale
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return stored.float() * wide


def _is_quantised(name: str) -> bool:
    return name.endswith("_proj.weight")


def _weights(shape: str, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    def draw(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / math.sqrt(columns)

    yield "model.embed_tokens.weight", torch.randn(VOCABULARY, HIDDEN, generator=generator)
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
        "architectures": ["Qwen3MoeForCausalLM" if shape == "moe" else "Qwen3ForCausalLM"],
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
    if scaling:
        skipped = ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(LAYERS))]
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "modules_to_not_convert": skipped if shape == "moe" else ["lm_head"],
            **({"weight_block_size": [BLOCK, BLOCK]} if scaling == "block" else {}),
        }
    return config


def _save(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
