"""A journal's file: its steps as JSON, and what is believed of one that lies there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patchkit.digests import sha256_of
from patchkit.durable.names import inside, plain
from patchkit.errors import DriftError, PatchkitError, SourceError, UsageError
from patchkit.reading import read_bytes

_FORMAT = 1
_LARGEST = 16 << 20  # bytes; the journal of 10,000 files is a fifth of it
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Step:
    """A change of one file as the journal names it: sha256, "" where there is no file."""

    path: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Steps:
    """What a journal says: ``folders`` are those made for it, ``note`` is its user's (JSON)."""

    steps: Sequence[Step]
    folders: Sequence[str]
    note: Mapping[str, Any]

    def to_json(self) -> bytes:
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()


def read_steps(path: Path, allowed: Callable[[str], bool]) -> Steps:
    """Read a journal. Raises ValueError for one that this patchkit would never have written."""
    try:
        table = json.loads(read_bytes(path, limit=_LARGEST, follow=False))
        if table["format"] != _FORMAT:
            raise ValueError(f"it has format {table['format']!r}, this patchkit reads {_FORMAT}")
        found = Steps([Step(**each) for each in table["steps"]], table["folders"], table["note"])
    except (UsageError, SourceError) as error:
        raise ValueError(error.what.removeprefix(f"{path}: ")) from None
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    _validate(found, allowed)
    return found


def _validate(found: Steps, allowed: Callable[[str], bool]) -> None:
    if not isinstance(found.folders, list) or not isinstance(found.note, dict):
        raise ValueError("a field has the wrong type")
    paths = [step.path for step in found.steps]
    for path in (*paths, *found.folders):
        if not isinstance(path, str) or not plain(path):
            raise ValueError(f"{path!r} is not a plain relative path")
    for step in found.steps:
        if not allowed(step.path):
            raise ValueError(f"{step.path!r} is not a file that patchkit changes here")
        if not (_is_sum(step.before) and _is_sum(step.after)):
            raise ValueError(f"{step.path!r} has no sha256")
    if len({*paths}) != len(paths):
        raise ValueError("a file is named twice")


def _is_sum(text: object) -> bool:
    return text == "" or (isinstance(text, str) and len(text) == 64 and _HEX.issuperset(text))


def place_of(root: Path, path: str) -> Path:
    """Return ``root/path``. Raises SourceError for links, DriftError for what is no file."""
    place = inside(root, path)
    if place.exists() and not place.is_file():
        raise DriftError(
            f"{path}: is no file",
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
