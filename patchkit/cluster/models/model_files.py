"""Name a model's folder, choose the files that vLLM loads, and record what the folder must hold."""

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Annotated

from patchkit.durable.atomic import replacing, sync
from patchkit.durable.paths import is_file, is_plain
from patchkit.errors import PatchkitError, SourceError, StorageError, UsageError
from patchkit.frozen import Fields, Texts, frozen
from patchkit.reading import LARGEST_IN_TREE, read_text
from patchkit.records import (
    RECIPES,
    RecordError,
    Utf8,
    matching,
    read_json,
    read_toml,
    record,
)

# Names follow the Hub's rules. They hold no --, so that a folder can have it in place of the slash.
_PART = r"(?!\.)(?!-)[A-Za-z0-9._-]{1,96}(?<![.-])"
# Old repositories have no organization.
_REPO = re.compile(rf"(?!.*(?:--|\.\.))(?:{_PART}/)?{_PART}")
_REVISION = re.compile(r"(?![-/.])[A-Za-z0-9._/-]{1,200}")
_FOLDER = re.compile(
    rf"(?:(?P<org>{_PART})--)?(?P<name>{_PART})@(?P<commit>[0-9a-f]{{12}})"
)
SHORT = 12
"""Hex digits of a commit in the name of a model's folder."""

_HINT = "name it as the Hub does: openai/gpt-oss-120b, or openai/gpt-oss-120b@main"
_PATTERNS = frozenset("*?[]\\")
_SPARE = 1.05  # times the size must be free: a full disk stops more than a download


def _require_file_name(path: str) -> None:
    # `hf download` reads names as patterns; names are also printed, copied and joined to a folder.
    if path.isprintable() and is_plain(path):
        is_option = path.startswith(("-", ".cache/"))
        if not is_option and _PATTERNS.isdisjoint(path):
            return
    raise RecordError(f"is {path!r}, which is no plain name of a file")


FileName = Annotated[Utf8, _require_file_name]
"""The path of a model's file, as the Hub, an index or a record names it; it stays in the folder."""

Commit = Annotated[str, matching("[0-9a-f]{40}", "a commit, 40 hex digits")]
_DIGEST = matching("[0-9a-f]{40}|[0-9a-f]{64}", "a sha256, or git's sha1")
Digest = Annotated[str, _DIGEST]


def split_revision(spec: str) -> tuple[str, str]:
    """Return the repository and the revision of ``REPO[@REV]``; "" stands for no revision.

    Raises UsageError if either is no name that the Hub allows.
    """
    repo, sign, revision = spec.partition("@")
    if not _REPO.fullmatch(repo):
        raise UsageError(f"{spec!r} names no model", hint=_HINT)

    is_revision = _REVISION.fullmatch(revision) and ".." not in revision
    if sign and not is_revision:
        raise UsageError(f"{revision!r} is no branch, tag or commit", hint=_HINT)
    return repo, revision


@frozen
class ModelFolder:
    """A commit of a model; read from a folder's name, ``commit`` has its first 12 digits alone."""

    repo: str
    commit: str

    @property
    def name(self) -> str:
        """Return the folder's name: ORG--NAME@COMMIT, with 12 digits of the commit."""
        return f"{self.repo.replace('/', '--')}@{self.commit[:SHORT]}"


def folder_of(name: str) -> ModelFolder | None:
    """Return the model that a folder is named after; None for any other folder."""
    match = _FOLDER.fullmatch(name)
    if match is None:
        return None

    repo = f"{match['org']}/{match['name']}" if match["org"] else match["name"]
    if not _REPO.fullmatch(repo):
        return None
    return ModelFolder(repo=repo, commit=match["commit"])


def models_folder(text: str) -> Path:
    """Return the folder of all models as a path on this machine.

    Raises UsageError if it does not begin at / or ~, or has unprintable characters.
    """
    # Path.expanduser raises for ~NAME of a user whom this machine does not know.
    folder = Path(os.path.expanduser(text))  # noqa: PTH111
    if not folder.is_absolute() or not text.isprintable():
        raise UsageError(
            f"{text!r} is no folder for models",
            hint="name one from / or ~, as in ~/models",
        )
    return folder


_OTHER_DISK = (
    "make room there: `patchkit model list` names the folders of models; or name another disk: "
    "`model_folder` in cluster.toml"
)


def require_room(
    folder: Path,
    size: int,
    more: int = 0,
    hint: str = _OTHER_DISK,
) -> int:
    """Return the free bytes on the disk of a folder, which may not exist yet, plus ``more``.

    ``more`` are bytes that will be replaced. Raises StorageError if ``size`` bytes do not fit.
    """
    places = (folder, *folder.parents)
    nearest = next(place for place in places if os.access(place, os.F_OK))
    free = shutil.disk_usage(nearest).free + more

    needed = int(size * _SPARE)
    if needed > free:
        raise StorageError(
            f"{folder}: needs {needed:,} bytes, and {free:,} are free", hint=hint
        )
    return free


_NAMES = read_toml(dict[str, Texts], RECIPES / "models.toml")
CACHE = ".cache"
"""The folder inside a model's folder in which hf and patchkit keep their records."""

RECORD = f"{CACHE}/patchkit/model.json"
"""The path of the record. A fetch writes it first, so that a check knows which are missing."""


def choose_files(names: Collection[str]) -> Texts:
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
        content = read_json(Fields, read_text(folder / index, limit=LARGEST_IN_TREE))
        shards = record(dict[str, FileName], content.get("weight_map"))
    except PatchkitError as error:
        raise RecordError(f"{index}: {error.what}") from None
    except RecordError as error:
        raise RecordError(f"{index}: {error}") from None
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
