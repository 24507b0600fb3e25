"""Choose the files of a model that vLLM loads: of gpt-oss 65 GB, and 196 in all.

What they say of themselves and of each other is read here, too: shards, and sizes.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from patchkit.cluster.models.names import FileName
from patchkit.errors import PatchkitError, SourceError
from patchkit.reading import LARGEST_IN_TREE, read_text
from patchkit.records import RecordError, record

INDEXES = (
    "model.safetensors.index.json",
    "consolidated.safetensors.index.json",
    "pytorch_model.bin.index.json",
)
"""Files that name the shards of a model, the first one of which vLLM loads."""

CONFIGS = ("config.json", "params.json", "adapter_config.json")
"""Without any of them nothing can be loaded."""

_LARGEST_HEADER = 100 << 20  # bytes, safetensors' own limit
_LENGTH = 8  # bytes of a header's length, little endian
# The same weights in forms that vLLM does not load, or for another program.
_ELSEWHERE = {"original", "metal", "onnx", "openvino", "coreml", "gguf", "flax", "runs"}
_TEXTS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "*.spm", "*.yaml")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack")
# In this order: the first kind that is there is loaded, in the main folder alone.
_KINDS = ("*.safetensors", "consolidated*.safetensors", "*.bin", "*.pt")
_OF_TRAINING = {
    *("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"),
}


def choose_files(names: Collection[str]) -> tuple[str, ...]:
    """Return the files to fetch, sorted. Raises SourceError if there are no weights."""
    for kind in _KINDS:
        weights = [name for name in names if _is_kind(name, kind)]
        if weights:
            break
    else:
        suffixes = {PurePosixPath(name).suffix for name in names if _matches(name, _WEIGHTS)}
        raise SourceError(
            "the repository has no weights that vLLM loads from a folder",
            why=f"it holds {', '.join(sorted(suffixes)) or 'no weights at all'}",
            hint="name the repository of the safetensors",
        )
    texts = {
        name
        for name in names
        if _matches(name.rpartition("/")[2], _TEXTS)
        and not _ELSEWHERE.intersection(name.split("/")[:-1])
        and not any(part.startswith(".") for part in name.split("/"))
    }
    others = {name for name in INDEXES if not _is_kind(name.removesuffix(".index.json"), kind)}
    return tuple(sorted({*weights, *texts} - others))


def is_weight(name: str) -> bool:
    """Return whether a file holds weights that vLLM may load: it lies in the main folder."""
    return "/" not in name and _matches(name, _WEIGHTS)


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_kind(name: str, kind: str) -> bool:
    if "/" in name or name in _OF_TRAINING or not fnmatchcase(name, kind):
        return False
    # Beside the others, consolidated ones are the same weights once more.
    return kind.startswith("consolidated") or not name.startswith("consolidated")


def read_shards(folder: Path, names: Collection[str]) -> list[str]:
    """Return the shards that the first index of a folder names.

    Raises RecordError, beginning with the index's name, for what is no index.
    """
    index = next((name for name in INDEXES if name in names), "")
    if not index:
        return []
    try:
        text = read_text(folder / index, limit=LARGEST_IN_TREE)
        shards = record(dict[str, FileName], json.loads(text)["weight_map"])
    except PatchkitError as error:
        raise RecordError(f"{index}: {error.what}") from None
    except RecordError as error:
        raise RecordError(f"{index}: {error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RecordError(f"{index}: is no index of shards") from None
    return sorted({*shards.values()})


def read_safetensors_size(path: Path) -> int | None:
    """Return how long a safetensors file has to be by its own header; None if it has none."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            if length > _LARGEST_HEADER:
                return None
            header = json.loads(file.read(length))
        ends = [
            tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"
        ]
        return _LENGTH + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None
