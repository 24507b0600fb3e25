"""Say the most tokens per second for one stream: the memory's bandwidth over what a token reads."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from patchkit.records import read_json
from patchkit.runtime.serve.model import SPARK, download
from patchkit.runtime.serve.request import ServeRequest
from patchkit.target import targets

# Names in the configs of different models, and in their tensors.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TAKEN = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_topk", "moe_top_k")
_ASIDE = re.compile(r"(?:^|\.)(?:mtp|visual|vision|audio|talker|code2wav)\w*\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EMBEDDINGS = re.compile(r"(?:^|\.)(?:embed_tokens|tok_embeddings|embeddings|embed|wte)\.")


def fastest_stream(request: ServeRequest, flags: Mapping[str, str]) -> Iterator[str]:
    """Yield the most tokens per second for one stream; nothing where no figure for it is known."""
    preset, memory = request.node.preset, request.memory
    reads = request.reads_gb or (preset and preset.reads_gb)
    device = targets().get("gb10" if memory.whose == SPARK else request.node.target)
    if reads and memory.shared and device and device.bandwidth:
        parts = int(flags.get("--tensor-parallel-size", 1))  # a pipeline's nodes read in turns
        alone = " without drafting" if "--speculative-config" in flags else ""
        yield (
            f"at most {device.bandwidth * parts / reads:.3g} tok/s for one stream{alone} on "
            f"{f'{parts} nodes' if parts > 1 else 'one node'}: {reads:.3g} GB of weights are read "
            f"for each token, at {device.bandwidth * parts} GB/s; its context's cache adds to that"
        )


def read_per_token(model: str, environment: Mapping[str, str]) -> float | None:
    """Return the GB of weights that a token reads, of a folder or a download; None for unknown."""
    found = [0.0]
    for folder in (Path(model), *download(model, environment).glob("snapshots/*")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, ArithmeticError):
            found.append(_read_of(folder))
    return max(found) / 1e9 or None


def _read_of(folder: Path) -> float:
    config = read_json(dict[str, Any], (folder / "config.json").read_bytes())
    config |= config.get("text_config", {})
    taken, there = (max(config.get(k, 0) for k in keys) for keys in (_TAKEN, _EXPERTS))
    tensors: dict[str, Any] = {}
    # Some repositories have the same weights once more, as consolidated.safetensors.
    for path in [*folder.glob("model*.safetensors")] or folder.glob("*.safetensors"):
        with path.open("rb") as file:
            length = min(int.from_bytes(file.read(8), "little"), 10**8)  # its own limit
            tensors |= read_json(dict[str, Any], file.read(length))
    total, tied = 0.0, not any("head." in name for name in tensors)
    for name in tensors.keys() - {"__metadata__"}:
        begin, end = tensors[name]["data_offsets"]
        # Layers beyond the last are for drafting; what sees or hears works on prompts.
        beyond = (layer := _LAYER.search(name)) and int(layer[1]) >= config["num_hidden_layers"]
        if not (beyond or _ASIDE.search(name)) and (tied or not _EMBEDDINGS.search(name)):
            total += (end - begin) * (taken / there if ".experts." in name else 1)
    return total
