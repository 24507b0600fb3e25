"""Write and read a journal's file: its steps as JSON, checked before they are believed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from patchkit.digests import Digest, sha256_of
from patchkit.durable.names import PlainPath, inside
from patchkit.errors import DriftError, PatchkitError, SourceError, UsageError
from patchkit.reading import read_bytes
from patchkit.records import read_json

_LARGEST = 16 << 20  # bytes; the journal of 10,000 files is a fifth of it


@dataclass(frozen=True, slots=True)
class Step:
    """A change of one file as the journal names it: sha256, "" where there is no file."""

    path: PlainPath
    before: Digest
    after: Digest


@dataclass(frozen=True, slots=True)
class Steps:
    """The content of a journal: ``folders`` are those it makes, ``note`` is its user's (JSON)."""

    steps: tuple[Step, ...]
    folders: tuple[PlainPath, ...]
    note: Mapping[str, Any]
    format: Literal[1] = 1

    def __post_init__(self) -> None:
        """Raise ValueError if a file is named twice."""
        if len({step.path for step in self.steps}) < len(self.steps):
            raise ValueError("a file is named twice")

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()


def read_steps(path: Path, allowed: Callable[[str], bool]) -> Steps:
    """Read a journal. Raises ValueError for one that this patchkit would never have written."""
    try:
        # follow=False: patchkit writes no link there, so one is somebody else's.
        found = read_json(Steps, read_bytes(path, limit=_LARGEST, follow=False))
    except (UsageError, SourceError) as error:
        raise ValueError(error.what.removeprefix(f"{path}: ")) from None
    for step in found.steps:
        if not allowed(step.path):
            raise ValueError(f"{step.path!r} is not a file that patchkit changes here")
    return found


def place_of(root: Path, path: str) -> Path:
    """Return ``root/path``. Raises SourceError for links, DriftError for what is not a file."""
    place = inside(root, path)
    if place.exists() and not place.is_file():
        raise DriftError(
            f"{path}: is not a file",
            why="a folder or a device stands where the release has a file",
            hint=f"look at {place}, and move it away",
        )
    return place


def present(place: Path) -> str:
    """Return the sha256 of what is there, "" for nothing."""
    return sha256_of(place) if place.exists() else ""


def state(root: Path, step: Step) -> str:
    """Return ``before``, ``after``, or ``unknown`` for a file that is neither or cannot be read."""
    try:
        found = present(place_of(root, step.path))
    except (OSError, PatchkitError):
        return "unknown"
    return {step.before: "before", step.after: "after"}.get(found, "unknown")
