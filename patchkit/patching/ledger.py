"""What patchkit did to a tree, kept in the tree: enough to know, to repeat and to undo it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from patchkit.digests import digest
from patchkit.durable.journal import Journal
from patchkit.errors import DriftError, HashMismatchError
from patchkit.quoting import quoted
from patchkit.source.tree import SourceTree

_NAME = "ledger.json"
_ORIGINALS = "originals"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """``.patchkit/ledger.json``; the originals lie beside it.

    ``files``: path → sha256 (before, after), ``""`` before a file was created. ``seen``: path →
    sha256 of every other file that a fix looked at, ``""`` if it did not exist. ``verdicts``: fix
    id, state, severity, reason, note. ``request``: target, arch, only, skip, also.
    """

    patchkit: str
    recipe: str
    project: str
    version: str
    request: Mapping[str, Any]
    files: Mapping[str, tuple[str, str]]
    seen: Mapping[str, str]
    verdicts: tuple[Mapping[str, str], ...]
    proofs: tuple[str, ...]
    format: int = field(default=_FORMAT)

    def to_json(self) -> bytes:
        """Deterministic: the same patch on the same release gives the same bytes."""
        return (json.dumps(asdict(self), indent=1, sort_keys=True) + "\n").encode()


def journal_of(tree: SourceTree, state: Path) -> Journal:
    """Return the journal through which a tree and its ledger are changed together."""
    named = tree.root / tree.project if tree.kind == "installed" else tree.root
    revert = quoted("patchkit", "revert", f"--{tree.project}-src", named)
    return Journal(
        root=tree.root,
        folder=state / "transaction",
        home=state,
        again=revert,
        rescue=f"{revert} --force",
    )


def ledger_path(state: Path) -> Path:
    return state / _NAME


def original_path(state: Path, path: str) -> Path:
    return state / _ORIGINALS / path


def read_ledger(state: Path) -> Ledger | None:
    """The ledger of a tree, or None. Raises DriftError if it cannot be understood."""
    place = ledger_path(state)
    if not place.is_file():
        return None
    try:
        table = json.loads(place.read_text(encoding="utf-8"))
        table["files"] = {path: (pair[0], pair[1]) for path, pair in table["files"].items()}
        table["verdicts"] = tuple(table["verdicts"])
        table["proofs"] = tuple(table["proofs"])
        ledger = Ledger(**table)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise DriftError(
            f"{place}: not a ledger of this patchkit: {error}",
            why="it was edited, or written by another version of patchkit",
            hint="bring the tree back with git, or unpack the release again",
        ) from None
    if ledger.format != _FORMAT:
        raise DriftError(f"{place}: has format {ledger.format}, this patchkit reads {_FORMAT}")
    return ledger


def originals(state: Path, ledger: Ledger) -> dict[str, bytes | None]:
    """What upstream shipped, for every file that was changed; None for those that were created.

    Raises HashMismatchError.
    """
    texts: dict[str, bytes | None] = {}
    for path, (before, _after) in ledger.files.items():
        place = original_path(state, path)
        data = place.read_bytes() if place.is_file() else None
        if digest(data) != before:
            raise HashMismatchError(
                f"{place}: is not the original of {path}",
                why="somebody edited or removed files in the ledger's folder",
                hint="bring the tree back with git, or unpack the release again",
            )
        texts[path] = data
    return texts


def edited_files(tree: SourceTree, ledger: Ledger) -> list[str]:
    """Files that are neither as patchkit left them nor as it found them."""
    return [path for path, pair in ledger.files.items() if _now(tree, path) not in pair]


def untouched(tree: SourceTree, ledger: Ledger) -> bool:
    """Whether everything a fix looked at is as the ledger says: nothing needs to be parsed."""
    return all(
        _now(tree, path) == after for path, (_before, after) in ledger.files.items()
    ) and all(_now(tree, path) == known for path, known in ledger.seen.items())


def _now(tree: SourceTree, path: str) -> str:
    place = tree.root / path
    return digest(place.read_bytes()) if place.is_file() else ""
