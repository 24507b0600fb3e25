"""Say which files a model's folder holds, so that nodes can be compared without hashing weights."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from patchkit.cluster.agent.node_facts import model_on_node
from patchkit.cluster.models.expected import CACHE, downloads, read_record
from patchkit.records import RecordError
from patchkit.units import BYTES_PER_MIB

_SMALL = BYTES_PER_MIB  # bytes of a file that is read: configuration and templates, not weights
_MOST = 5_000  # files of a folder that is a model's


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePrint:
    """A file: its bytes, and its digest as it was written down or, of a small one, as it is."""

    size: int
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPrint:
    """A model's folder; ``problem`` is what the quick check says is wrong first, "" for nothing.

    ``commit`` is what its record says, "" without one.
    """

    folder: str
    problem: str
    commit: str = ""
    files: Mapping[str, FilePrint] = field(default_factory=dict)


def model_print(folder: str) -> dict[str, Any]:
    """Return what a folder holds."""
    place = Path(folder).expanduser()
    problem, commit = model_on_node(folder).problem, ""
    digests: dict[str, str] = {}
    if place.is_dir():
        digests = {name: each.digest for name, each in downloads(place)}
        with contextlib.suppress(RecordError):
            if known := read_record(place):
                commit = known.commit
                digests |= {name: each.digest for name, each in known.files.items()}
    files = {name: _print_file(path, digests.get(name, "")) for name, path in _list_files(place)}
    return asdict(ModelPrint(folder=str(place), problem=problem, commit=commit, files=files))


def _list_files(place: Path) -> list[tuple[str, Path]]:
    found = []
    for path in place.rglob("*") if place.is_dir() else ():
        name = path.relative_to(place)
        if name.parts[0] not in (CACHE, ".git") and path.is_file():
            found.append((name.as_posix(), path))
            if len(found) == _MOST:
                break
    return sorted(found)


def _print_file(path: Path, digest: str) -> FilePrint:
    try:
        size = path.stat().st_size
        if size <= _SMALL:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return FilePrint(size=-1)
    return FilePrint(size=size, digest=digest)
