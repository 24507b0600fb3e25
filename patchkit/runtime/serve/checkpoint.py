"""Read a checkpoint: its config, its size, the names, types and shapes of its tensors."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from patchkit.frozen import Fields, Values, frozen
from patchkit.records import read_json
from patchkit.units import BYTES_PER_GIB

PLAIN = ("BF16", "F16")
"""Types of 16 bits: a tensor of these types is not quantised."""

# Names that different models use in their configs and for their tensors.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = (
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
_FILE_COUNT = re.compile(r"-of-0*(\d+)\.")
_NO_CHECKPOINT = (OSError, ValueError, LookupError, TypeError, ArithmeticError)
_LONGEST_HEADER = 10**8  # bytes: the limit of safetensors


@frozen
class Tensor:
    """A tensor. ``size`` is in bytes; ``layer`` is None if it is outside the numbered layers."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    layer: int | None


@frozen
class Checkpoint:
    """The config and the tensors of a checkpoint.

    In ``config``, the values of ``text_config`` have replaced those of the whole. ``aside`` are the
    names of tensors that are not read for every token: for drafting, images and audio. ``reads``
    are the bytes of weights that are read for a token.
    """

    config: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    aside: tuple[str, ...]
    reads: float

    @property
    def has_plain_head(self) -> bool:
        """Return whether the output head is in 16 bits and no drafting part has its own head."""
        if any("head." in name for name in self.aside):
            return False

        heads = [tensor for tensor in self.tensors if "head." in tensor.name]
        if not heads:
            heads = [row for row in self.tensors if _EMBEDDINGS.search(row.name)]

        return len(heads) == 1 and heads[0].dtype in PLAIN


def find_checkpoint(model: str, environment: Values) -> Checkpoint | None:
    """Return the checkpoint that ``model`` names: a folder, or a download of a repository.

    If there are several, return the one with the most bytes read for a token. Return None if none
    can be read.
    """
    checkpoints = []
    snapshots = download_folder(model, environment).glob("snapshots/*")
    for folder in (Path(model), *snapshots):
        with contextlib.suppress(*_NO_CHECKPOINT):
            checkpoints.append(_read_checkpoint(folder))

    return max(checkpoints, key=lambda checkpoint: checkpoint.reads, default=None)


def _read_checkpoint(folder: Path) -> Checkpoint:
    """Read the checkpoint in a folder. Raises one of ``_NO_CHECKPOINT`` if it cannot be used."""
    config = read_json(Fields, (folder / "config.json").read_bytes())
    # text_config may name other architectures, but those of the whole model count.
    architectures = tuple(config.get("architectures") or ())
    config |= {**config.get("text_config", {}), "architectures": architectures}

    tensors = []
    aside = []
    for name, header in _read_headers(folder).items():
        begin, end = header["data_offsets"]
        layer = _LAYER.search(name)
        tensor = Tensor(
            name=name,
            dtype=str(header.get("dtype")),
            shape=tuple(map(int, header.get("shape", ()))),
            size=end - begin,
            layer=int(layer[1]) if layer else None,
        )

        # Layers beyond num_hidden_layers are for drafting. Image and audio parts work on prompts,
        # not on each token.
        is_beyond = layer and int(layer[1]) >= int(config["num_hidden_layers"])
        if is_beyond or _ASIDE.search(name):
            aside.append(name)
        else:
            tensors.append(tensor)

    return Checkpoint(
        config=config,
        tensors=tuple(tensors),
        aside=tuple(aside),
        reads=_count_reads(config, tensors),
    )


def _read_headers(folder: Path) -> Fields:
    """Return tensor → its safetensors header: type, shape and offsets.

    Raises ValueError if there are not as many files as their names say (``00001-of-00004``), or if
    a header is no JSON, or too long.
    """
    # Take all files only if none is called model*: some repositories have the same weights again
    # as consolidated.safetensors.
    paths = [*folder.glob("model*.safetensors")] or [*folder.glob("*.safetensors")]
    headers: Fields = {}
    for path in paths:
        count = _FILE_COUNT.search(path.name)
        if count and int(count[1]) != len(paths):
            raise ValueError("a file is still to be downloaded")

        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            headers |= read_json(Fields, file.read(min(length, _LONGEST_HEADER)))

    headers.pop("__metadata__", None)
    return headers


def _count_reads(config: Mapping[str, Any], tensors: Sequence[Tensor]) -> float:
    """Return the bytes of weights that are read for a token: all, but only the chosen experts."""
    experts = max(config.get(key) or 0 for key in _EXPERTS)
    experts_per_token = max(config.get(key) or 0 for key in _EXPERTS_PER_TOKEN)

    # A model without a head uses its embeddings as the head.
    is_tied = not any("head." in tensor.name for tensor in tensors)

    reads = 0.0
    for tensor in tensors:
        if ".experts." in tensor.name:
            reads += tensor.size * (experts_per_token / experts)
        elif is_tied or not _EMBEDDINGS.search(tensor.name):
            reads += tensor.size

    return reads


def download_folder(model: str, environment: Values) -> Path:
    """Return the folder into which huggingface_hub downloads a model. It need not exist."""
    user_cache = f"{environment.get('HOME', '')}/.cache/huggingface"
    home = environment.get("HF_HOME") or user_cache
    cache = environment.get("HF_HUB_CACHE") or f"{home}/hub"

    return Path(cache, "models--" + model.replace("/", "--"))


def weights_gib(model: str, environment: Values) -> float | None:
    """Return the GiB of weights in a model's folder or largest snapshot, None if there are none.

    Only files named ``*.safetensors`` count.
    """
    snapshots = download_folder(model, environment).glob("snapshots/*")
    largest = 0

    for folder in (Path(model), *snapshots):
        paths = folder.glob("*.safetensors")
        # Skip links to blobs that are not downloaded yet or cannot be read.
        files = [path for path in paths if os.access(path, os.R_OK)]
        largest = max(largest, sum(file.stat().st_size for file in files))

    return largest / BYTES_PER_GIB or None
