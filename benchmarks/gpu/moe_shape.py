"""Write a random FP8 checkpoint of the shape of Qwen3-30B-A3B-FP8, with fewer layers.

    python benchmarks/gpu/moe_shape.py FOLDER [LAYERS]

Blocks of 128 by 128 with a scale each, as that model has them; 0.62 GB a layer. The words are made
up, so text is noise: speed alone can be measured with it. Made on the GPU, in seconds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizer import write_tokenizer

HIDDEN, EXPERT, EXPERTS, TOP_K = 2048, 768, 128, 8
HEADS, KV_HEADS, HEAD_DIM, BLOCK, VOCABULARY = 32, 4, 128, 128, 896
SPREAD = 0.02  # of weights, as trained ones have
FP8_RMS = 100.0  # of the stored values: the finest quarter of FP8's range is left out


def linear(rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Return a weight in FP8 and its scales; the products have the size of a trained model's."""
    values = torch.randn(rows, columns, device="cuda") * FP8_RMS
    scale = torch.full(
        (rows // BLOCK, columns // BLOCK), SPREAD / FP8_RMS, device="cuda"
    )
    return {
        "weight": values.clamp(-448, 448).to(torch.float8_e4m3fn),
        "weight_scale_inv": scale,
    }


def layer(number: int) -> dict[str, torch.Tensor]:
    at = f"model.layers.{number}."
    ones = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
    head = torch.ones(HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    made = {
        "input_layernorm.weight": ones,
        "post_attention_layernorm.weight": ones.clone(),
        "self_attn.q_norm.weight": head,
        "self_attn.k_norm.weight": head.clone(),
        "mlp.gate.weight": (
            torch.randn(EXPERTS, HIDDEN, device="cuda") * SPREAD
        ).bfloat16(),
    }
    wide, narrow = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (wide, HIDDEN),
        "self_attn.k_proj": (narrow, HIDDEN),
        "self_attn.v_proj": (narrow, HIDDEN),
        "self_attn.o_proj": (HIDDEN, wide),
    }
    for expert in range(EXPERTS):
        for name in ("gate_proj", "up_proj"):
            shapes[f"mlp.experts.{expert}.{name}"] = (EXPERT, HIDDEN)
        shapes[f"mlp.experts.{expert}.down_proj"] = (HIDDEN, EXPERT)
    for name, shape in shapes.items():
        made |= {f"{name}.{key}": value for key, value in linear(*shape).items()}
    return {at + name: tensor.cpu() for name, tensor in made.items()}


def config(layers: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": 6144,
        "moe_intermediate_size": EXPERT,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
    }


def main(folder: Path, layers: int) -> None:
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    words = {
        name: (torch.randn(VOCABULARY, HIDDEN) * SPREAD).bfloat16()
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    words["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    index = {}
    for number in range(layers + 1):
        name = f"model-{number:05}.safetensors"
        tensors = layer(number) if number < layers else words
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index})
    )
    (folder / "config.json").write_text(json.dumps(config(layers), indent=1))
    (folder / "generation_config.json").write_text("{}")
    write_tokenizer(folder, VOCABULARY)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 16)
