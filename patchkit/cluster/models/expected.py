"""Read what a model's folder has to hold: patchkit's record of it, and what `hf download` left.

For each file hf writes ``.cache/huggingface/download/FILE.metadata``: the commit, the ETag, which
is the sha256 of a large file and git's sha1 of another, and a time, a line each. It has done so
since 0.23, and 2.4 does.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from patchkit.cluster.models.names import Commit, Digest, FileName, is_file_name
from patchkit.durable.atomic import replacing
from patchkit.durable.failure import translated
from patchkit.durable.names import is_file
from patchkit.errors import PatchkitError
from patchkit.reading import LARGEST_IN_TREE, read_text
from patchkit.records import RecordError, read_json, record

CACHE = ".cache"
"""The folder beside the files in which hf and patchkit keep what they know of them."""

_DOWNLOADS = f"{CACHE}/huggingface/download"
_RECORD = f"{CACHE}/patchkit/model.json"
_SUFFIX = ".metadata"
_LOST = re.compile(r"\.[0-9a-f]{40,64}\.[0-9a-f]{8}\.incomplete$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A file of a commit: its size in bytes, and its sha256, or git's sha1 of a small one."""

    size: int
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """A commit of a model, and the files of it that were chosen."""

    repo: str
    commit: Commit
    files: Mapping[FileName, ModelFile]

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size for file in self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Downloaded:
    """What hf wrote down of a file: of which commit it is, and its digest, "" if it has none."""

    commit: str
    digest: str


def read_record(folder: Path) -> ModelRecord | None:
    """Return patchkit's record of a folder, None if there is none. Raises RecordError."""
    place = folder / _RECORD
    if not is_file(place):
        return None
    try:
        return read_json(ModelRecord, read_text(place, limit=LARGEST_IN_TREE, follow=False))
    except PatchkitError as error:
        raise RecordError(error.what) from None


def write_record(folder: Path, made: ModelRecord) -> None:
    """Write the record, before the first file: an unfinished folder is known as one."""
    place = folder / _RECORD
    with translated(at=place):
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place) as file:
            file.write(json.dumps(asdict(made), indent=1).encode())


def downloads(folder: Path) -> Iterator[tuple[str, Downloaded]]:
    """Yield what hf wrote down of each file; what cannot be read says nothing."""
    root = folder / _DOWNLOADS
    for place in sorted(root.rglob(f"*{_SUFFIX}")):
        name = place.relative_to(root).as_posix().removesuffix(_SUFFIX)
        if not is_file_name(name) or not is_file(place):
            continue
        try:
            lines = read_text(place, limit=4096, follow=False).split("\n")
            commit = record(Commit, lines[0].strip())
        except (PatchkitError, RecordError):
            continue
        digest = ""
        with contextlib.suppress(RecordError, IndexError):
            digest = record(Digest, lines[1].strip().strip('"'))
        yield name, Downloaded(commit=commit, digest=digest)


def unfinished(folder: Path) -> list[Path]:
    """Return the parts of files that a download has begun, or that an interrupted one left."""
    return sorted((folder / _DOWNLOADS).rglob("*.incomplete"))


def drop_lost_parts(folder: Path, *, all_parts: bool) -> None:
    """Remove the parts that no download goes on with, or all of them once the files are whole.

    Newer releases of hf begin a file anew, under another name each time.
    """
    for part in unfinished(folder):
        if all_parts or _LOST.search(part.name):
            with translated(at=part):
                part.unlink(missing_ok=True)


def forget(folder: Path, name: str) -> None:
    """Remove a file, and what hf wrote down of it: the next fetch brings it anew."""
    with translated(at=folder / name):
        (folder / name).unlink(missing_ok=True)
        (folder / _DOWNLOADS / f"{name}{_SUFFIX}").unlink(missing_ok=True)
