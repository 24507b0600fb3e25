"""Choose the files of a model that vLLM loads, and record which files a folder must hold."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path, PurePosixPath

from patchkit.cluster.models.model_folder import Commit, Digest, FileName
from patchkit.durable.atomic import replacing, sync
from patchkit.durable.paths import is_file
from patchkit.errors import PatchkitError, SourceError
from patchkit.frozen import frozen
from patchkit.reading import LARGEST_IN_TREE, read_text
from patchkit.records import RECIPES, RecordError, read_json, read_toml, record

_NAMES = read_toml(dict[str, tuple[str, ...]], RECIPES / "models.toml")
CACHE = ".cache"
"""The folder inside a model's folder in which hf and patchkit keep their records."""

RECORD = f"{CACHE}/patchkit/model.json"
"""The path of the record. A fetch writes it first, so that a check knows which are missing."""


def choose_files(names: Collection[str]) -> tuple[str, ...]:
    """Return the files to fetch, sorted: the weights that vLLM loads, their index, and texts.

    Raises SourceError without such weights, RecordError if a name leads out of the folder.
    """
    # Every name is checked, also of files that are not fetched: a bad one discredits the rest.
    record(tuple[FileName, ...], list(names))

    kind = _loaded_kind(names)
    weights = {name for name in names if _is_kind(name, kind)}
    texts = {name for name in names if _is_text(name)}
    other_indexes = {
        name
        for name in _NAMES["indexes"]
        if not _is_kind(name.removesuffix(".index.json"), kind)
    }
    return tuple(sorted((weights | texts) - other_indexes))


def _loaded_kind(names: Collection[str]) -> str:
    """Return the pattern of the weights that vLLM loads. Raises SourceError if there are none."""
    for kind, name in product(_NAMES["kinds"], names):
        if _is_kind(name, kind):
            return kind

    suffixes = {PurePosixPath(name).suffix for name in filter(is_weights, names)}
    raise SourceError(
        "the repository has no weights that vLLM loads from a folder",
        why=f"it holds {', '.join(sorted(suffixes)) or 'no weights at all'}",
        hint="name the repository of the safetensors",
    )


def _is_kind(name: str, kind: str) -> bool:
    if "/" in name or name in _NAMES["training"]:
        return False
    # A repository may have the weights twice: as consolidated files, too, which are left out.
    is_once_more = name.startswith("consolidated") and "consolidated" not in kind
    return fnmatchcase(name, kind) and not is_once_more


def _is_text(name: str) -> bool:
    is_hidden = name.startswith(".") or "/." in name
    *folders, filename = name.split("/")
    if is_hidden or not {*_NAMES["elsewhere"]}.isdisjoint(folders):
        return False
    return _matches(filename, _NAMES["texts"])


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_weights(name: str) -> bool:
    """Return whether a file holds weights, judged by its name."""
    return _matches(name, _NAMES["weights"])


def is_loaded(name: str) -> bool:
    """Return whether vLLM may load a file of a model's folder, judged by its name."""
    return _matches(name.rpartition("/")[2], _NAMES["texts"] + _NAMES["weights"])


def is_safetensors(name: str) -> bool:
    """Return whether a file is one of safetensors in the main folder, from which vLLM loads."""
    return "/" not in name and name.endswith(".safetensors")


def read_shards(folder: Path, names: Collection[str]) -> list[str]:
    """Return the shards that the first index of a folder names; [] without an index.

    Raises RecordError, which begins with the name of the index, if it cannot be read as one.
    """
    index = next((name for name in _NAMES["indexes"] if name in names), "")
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


@frozen
class ModelFile:
    """A file of a commit: its size in bytes, and its digest.

    The digest is the sha256 of a large file (git LFS), git's sha1 of a small one.
    """

    size: int
    digest: Digest


@frozen
class ModelRecord:
    """A commit of a model, and those of its files that a folder must hold."""

    repo: str
    commit: Commit
    files: Mapping[FileName, ModelFile]


def read_record(folder: Path) -> ModelRecord | None:
    """Return the record of a folder, None if it has none. Raises RecordError for a broken one."""
    place = folder / RECORD
    if not is_file(place):
        return None

    try:
        text = read_text(place, limit=LARGEST_IN_TREE, follow=False)
        return read_json(ModelRecord, text)
    except PatchkitError as error:
        raise RecordError(error.what) from None


def write_record(folder: Path, model_record: ModelRecord) -> None:
    """Write the record of a folder, and sync it to the disk. Raises OSError, StorageError."""
    place = folder / RECORD
    place.parent.mkdir(parents=True, exist_ok=True)
    with replacing(place) as file:
        file.write(json.dumps(asdict(model_record), indent=1).encode())
    sync(folder / CACHE)
    sync(folder)


def file_size(path: Path) -> int:
    """Return the size of a file in bytes; -1 if there is no such file, or it cannot be read."""
    try:
        return path.stat().st_size if path.is_file() else -1
    except OSError:
        return -1
