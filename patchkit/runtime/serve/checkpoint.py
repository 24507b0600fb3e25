"""Read what a checkpoint says of itself: its config, and names and sizes of its tensors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchkit.records import read_json
from patchkit.runtime.serve.model import download

PLAIN = ("BF16", "F16")
"""Types of 16 bits, in which nothing is that is quantised."""

# Names in the configs of different models, and in their tensors.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TAKEN = (
    "num_experts_per_tok",
    "top_k_experts",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
)
_ASIDE = re.compile(r"(?:^|\.)(?:mtp|visual|vision|audio|talker|code2wav)\w*\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EMBEDDINGS = re.compile(
    r"(?:^|\.)(?:embed_tokens|tok_embeddings|embeddings|embed|wte)\."
)
_OF = re.compile(r"-of-0*(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor's place and form; ``layer`` is None outside the layers that each token passes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    layer: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A folder's config, with its text's on top, and tensors; ``aside`` is not for each token.

    ``aside`` has what drafts, sees or hears; ``reads`` are the bytes of weights that a token reads.
    """

    config: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    aside: tuple[str, ...]
    reads: float

    @property
    def has_plain_head(self) -> bool:
        """Return whether the head is in 16 bits and nothing that drafts has another one."""
        heads = [tensor for tensor in self.tensors if "head." in tensor.name]
        heads = heads or [
            tensor for tensor in self.tensors if _EMBEDDINGS.search(tensor.name)
        ]
        return (
            len(heads) == 1
            and heads[0].dtype in PLAIN
            and not any("head." in it for it in self.aside)
        )


def find_checkpoint(model: str, environment: Mapping[str, str]) -> Checkpoint | None:
    """Return a folder's or a download's, of several the one that reads most; None for none."""
    found = []
    for folder in (Path(model), *download(model, environment).glob("snapshots/*")):
        with contextlib.suppress(
            OSError, ValueError, LookupError, TypeError, ArithmeticError
        ):
            found.append(_read_checkpoint(folder))
    return max(found, key=lambda each: each.reads, default=None)


def _read_checkpoint(folder: Path) -> Checkpoint:
    whole = read_json(dict[str, Any], (folder / "config.json").read_bytes())
    named = tuple(
        whole.get("architectures") or ()
    )  # which those of a part may say otherwise
    config = {**whole, **whole.get("text_config", {}), "architectures": named}
    taken, there = (
        max(config.get(k) or 0 for k in keys) for keys in (_TAKEN, _EXPERTS)
    )
    # Some repositories have the same weights once more, as consolidated.safetensors.
    paths = [*folder.glob("model*.safetensors")] or [*folder.glob("*.safetensors")]
    if any(int(count) != len(paths) for it in paths for count in _OF.findall(it.name)):
        raise ValueError("a file is still to be downloaded")
    headers: dict[str, Any] = {}
    for path in paths:
        with path.open("rb") as file:
            length = min(int.from_bytes(file.read(8), "little"), 10**8)  # its own limit
            headers |= read_json(dict[str, Any], file.read(length))
    headers.pop("__metadata__", None)
    tensors, aside = [], []
    for name, said in headers.items():
        # Layers beyond the last are for drafting; what sees or hears works on prompts.
        place = _LAYER.search(name)
        layer = int(place[1]) if place else None
        if _ASIDE.search(name) or (
            layer is not None and layer >= config["num_hidden_layers"]
        ):
            aside.append(name)
            continue
        begin, end = said["data_offsets"]
        shape, kind = tuple(map(int, said.get("shape", ()))), str(said.get("dtype"))
        tensors.append(
            Tensor(name=name, dtype=kind, shape=shape, size=end - begin, layer=layer)
        )
    tied = not any("head." in tensor.name for tensor in tensors)
    reads = 0.0
    for it in tensors:
        if tied or not _EMBEDDINGS.search(it.name):
            reads += it.size * (taken / there if ".experts." in it.name else 1)
    return Checkpoint(
        config=config, tensors=tuple(tensors), aside=tuple(aside), reads=reads
    )
