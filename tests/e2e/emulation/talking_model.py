"""Make a model that says the same to everybody: it thinks, answers, and calls a tool if it has one.

Attention and MLP add nothing to an embedding that has a dimension of its own for each token, so the
next token follows from the last one alone; which it is, lm_head says. The chat template chooses by
the token that it ends with. So a real server streams a known text, with its own parsers.

    python -m e2e.emulation.talking_model FOLDER
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from e2e.emulation.prepare import CONFIG, TOKENIZER

END, UNKNOWN = "<end>", "<unknown>"
THOUGHT = ("Six", " times", " seven", ":", " six", " rows", " of", " sevens,", " naïvely", " added")
ANSWER = ("\n\nIt", " is", " **42**", ",", " or", " 四十二", ".")
CALL = (
    *("<tool_call>\n", '{"name": "weather", ', '"arguments": ', '{"city": ', '"Paris", '),
    *('"days": ', "2}}", "\n</tool_call>"),
)
CALLED = 'weather({"city": "Paris", "days": 2})'
WEATHER = {"type": "function", "function": {"name": "weather"}}
# What a template ends with, and all that follows it. A token stands in one row alone.
CHAINS = {
    "<|thinks|>": ("<think>", *THOUGHT, "</think>", *ANSWER, END),
    "<|answers|>": ("It's", " 42", "!", END),
    "<|calls|>": (*CALL, END),
    "<|counts|>": (" one", " two", " three", " one"),
}
TEMPLATE = """\
{%- for message in messages %}{{ message['role'] }}: {{ message['content'] }}
{% endfor -%}
{%- if 'count' in (messages | last)['content'] %}<|counts|>
{%- elif tools and (messages | last)['role'] != 'tool' %}</think><|calls|>
{%- elif enable_thinking is defined and not enable_thinking %}</think><|answers|>
{%- else %}<|thinks|>{% endif -%}
"""
HEAD, HEADS, CONTEXT = 32, 3, 32_768
HIDDEN = HEAD * HEADS  # more than there are tokens
CERTAIN = 10.0  # a logit of 98, where all others are 0


def make_talking_model(folder: Path) -> None:
    """Write config, tokenizer, chat template and weights; the same ones every time."""
    folder.mkdir(parents=True, exist_ok=True)
    words = dict.fromkeys((END, UNKNOWN, *(each for row in CHAINS.items() for each in _all(row))))
    numbers = {word: number for number, word in enumerate(words)}
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    sizes |= {"vocab_size": HIDDEN, "num_hidden_layers": 1, "max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes | {"head_dim": HEAD}))
    own = {"chat_template": TEMPLATE, "model_max_length": CONTEXT}
    own["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that older transformers know, too
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER | own))
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in (END, *CHAINS)])
    tokenizer.add_tokens(["<think>", "</think>"])  # found within a text, and shown
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(_weights(numbers), folder / "model.safetensors", metadata={"format": "pt"})


def _all(row: tuple[str, tuple[str, ...]]) -> tuple[str, ...]:
    return (row[0], *row[1])


def _weights(numbers: dict[str, int]) -> dict[str, np.ndarray]:
    inner, layer = CONFIG["intermediate_size"], "model.layers.0"
    weights = {
        f"{layer}.self_attn.{each}_proj.weight": np.zeros((HIDDEN, HIDDEN)) for each in "qkvo"
    }
    for each in ("gate", "up"):
        weights[f"{layer}.mlp.{each}_proj.weight"] = np.zeros((inner, HIDDEN))
    weights[f"{layer}.mlp.down_proj.weight"] = np.zeros((HIDDEN, inner))
    for norm in ("model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"):
        weights[f"{norm}.weight"] = np.ones(HIDDEN)
    weights["model.embed_tokens.weight"] = np.eye(HIDDEN)
    head = weights["lm_head.weight"] = np.zeros((HIDDEN, HIDDEN))
    for row in CHAINS.items():
        for before, after in pairwise(map(numbers.__getitem__, _all(row))):
            head[after, before] = CERTAIN
    return {name: value.astype(np.float32) for name, value in weights.items()}


if __name__ == "__main__":
    make_talking_model(Path(sys.argv[1]))
