"""A byte-level tokenizer made on the spot, so that text works without a download."""

from __future__ import annotations

import json
import string
from itertools import product
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<s>", "</s>")  # the ids that the tiny models name: bos 0, eos 1
CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def write_tokenizer(folder: Path, vocabulary: int) -> Tokenizer:
    """All bytes, then pairs of letters until the vocabulary is full: each token id has a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [f"{a}{b}" for a, b in product(string.ascii_lowercase, repeat=2)]
    pairs = pairs[: vocabulary - len(SPECIAL) - len(letters)]
    names = {name: number for number, name in enumerate([*SPECIAL, *letters, *pairs])}
    made = Tokenizer(
        models.BPE(vocab=names, merges=[(pair[0], pair[1]) for pair in pairs])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "chat_template": CHAT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return made
