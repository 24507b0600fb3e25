"""Read of a model's files what they say of themselves and of each other: shards, and sizes."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from patchkit.cluster.models.choice import INDEXES
from patchkit.cluster.models.names import is_file_name
from patchkit.errors import PatchkitError
from patchkit.reading import LARGEST_IN_TREE, read_text
from patchkit.records import RecordError

_LARGEST_HEADER = 100 << 20  # bytes, safetensors' own limit
_LENGTH = 8  # bytes of a header's length, little endian


def shards(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Return the shards that the first index of a folder names, and its name for each.

    Raises RecordError, beginning with the index's name, for what is no index.
    """
    index = next((each for each in INDEXES if each in names), "")
    if not index:
        return {}
    try:
        text = read_text(folder / index, limit=LARGEST_IN_TREE)
    except PatchkitError as error:
        raise RecordError(f"{index}: {error.what}") from None
    return dict.fromkeys(named_shards(text, index), index)


def named_shards(text: str, index: str) -> list[str]:
    """Return the shards that the text of an index names. Raises RecordError."""
    try:
        table = json.loads(text)["weight_map"]
        named = set(table.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RecordError(f"{index}: is no index of shards") from None
    for name in named:
        if not isinstance(name, str) or not is_file_name(name):
            raise RecordError(f"{index}: names {name!r}, which is no plain name of a file")
    return sorted(named)


def safetensors_size(path: Path) -> int | None:
    """Return how long a safetensors file has to be by its own header; None if it has none."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            if length > _LARGEST_HEADER:
                return None
            header = json.loads(file.read(length))
        ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
        return _LENGTH + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None
