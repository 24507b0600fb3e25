"""Record in a tree what patchkit did to it, so that a later run can check, repeat or undo it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from packaging.version import Version

from patchkit.digests import Digest, digest, sha256_of
from patchkit.durable.journal import Journal
from patchkit.durable.paths import PlainPath, place_of
from patchkit.errors import (
    DriftError,
    HashMismatchError,
    PatchkitError,
    SourceError,
    UsageError,
)
from patchkit.frozen import frozen
from patchkit.patching.fix import Id, Patch, Request, Severity, State, Verdict
from patchkit.quoting import quoted
from patchkit.reading import LARGEST_IN_TREE, read_bytes, read_text
from patchkit.records import RecordError, Sha256, Utf8, matching, one_of, read_json
from patchkit.source.project import projects
from patchkit.source.tree import SourceTree
from patchkit.target import MODES, targets

_NAME = "ledger.json"
_ORIGINALS = "originals"


_DAY = matching(r"(\d{4}-\d\d-\d\d)?", "a day, such as 2026-11-22")


@frozen
class LedgerRequest:
    """The user's request when a tree was patched, with the texts of patches.

    Every field is checked on reading: a tree may come from elsewhere, with its ledger.
    """

    target: Annotated[str, one_of(*targets())]
    arch: Annotated[str, one_of(*MODES)]
    only: tuple[Id, ...]
    skip: tuple[Id, ...]
    also: tuple[Id, ...]
    patches: tuple[Patch, ...] = ()

    @classmethod
    def of(cls, request: Request) -> LedgerRequest:
        return cls(
            target=request.target.name,
            arch=request.arch,
            only=tuple(sorted(request.only)),
            skip=tuple(sorted(request.skip)),
            also=tuple(sorted(request.also)),
            patches=request.patches,
        )

    def fields(self) -> dict[str, object]:
        """Return the fields of the request for JSON, without the patches."""
        fields = asdict(self)
        del fields["patches"]
        return fields


@frozen
class LedgerVerdict:
    """A verdict in the ledger; ``severity`` is "" if the verdict has none."""

    id: Id
    state: State
    severity: Severity | Literal[""]
    reason: Utf8
    note: Utf8

    @classmethod
    def of(cls, verdict: Verdict) -> LedgerVerdict:
        return cls(
            id=verdict.fix.id,
            state=verdict.state,
            severity=verdict.severity or "",
            reason=verdict.reason,
            note=verdict.note,
        )


@frozen
class Ledger:
    """The content of ``.patchkit/ledger.json``; the originals are in the same folder.

    ``files`` maps the path of each patched text to its sha256 (before, after); before is "" for a
    file that patchkit created. ``libraries`` is the same for binary files. ``seen`` maps every
    other file that a fix looked at to its sha256, "" if it did not exist. ``date`` is the day of
    the proofs, from ``today``; "" in wheels, whose bytes must not depend on the day.
    """

    patchkit: Annotated[str, Version]
    recipe: Annotated[str, matching("[0-9a-z]{1,64}", "a digest")]
    project: Id
    version: Annotated[str, Version]
    request: LedgerRequest
    files: Mapping[PlainPath, tuple[Digest, Sha256]]
    seen: Mapping[PlainPath, Digest]
    verdicts: tuple[LedgerVerdict, ...]
    proofs: tuple[Utf8, ...]
    libraries: Mapping[PlainPath, tuple[Sha256, Sha256]] = field(default_factory=dict)
    date: Annotated[str, _DAY] = ""
    format: Literal[1] = 1

    def __post_init__(self) -> None:
        """Raise ValueError if a fix has two verdicts, or a path is both text and library."""
        if len({verdict.id for verdict in self.verdicts}) < len(self.verdicts):
            raise ValueError("has a fix twice")
        if self.files.keys() & self.libraries.keys():
            raise ValueError("has a file twice")

    def to_json(self) -> bytes:
        """Return the ledger as JSON. The same request, tree and day give the same bytes."""
        fields = asdict(self)
        # Leave out empty fields that ledgers of earlier versions do not have.
        for name in ("date", "libraries"):
            if not fields[name]:
                del fields[name]
        if not self.request.patches:
            del fields["request"]["patches"]

        # Sort the keys: the order of the dicts depends on the order in which files were read.
        return (json.dumps(fields, indent=1, sort_keys=True) + "\n").encode()


def today() -> str:
    """Return the day for a ledger, ``2026-11-22`` in UTC, of SOURCE_DATE_EPOCH if that is set.

    Raises UsageError if SOURCE_DATE_EPOCH is not a number of seconds.
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or time.time()
    try:
        return datetime.fromtimestamp(int(epoch), UTC).date().isoformat()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"SOURCE_DATE_EPOCH is {epoch!r}, which is no number of seconds since 1970",
            hint="unset SOURCE_DATE_EPOCH",
        ) from None


def journal_of(tree: SourceTree, state: Path) -> Journal:
    """Return the journal that changes a tree and its ledger together."""
    revert = _revert_command(tree.project, state)
    return Journal(
        root=tree.root,
        folder=state / "transaction",
        home=state,
        again=revert,
        rescue=f"{revert} --force",
    )


def _revert_command(project: str, state: Path) -> str:
    if project in projects():
        return quoted("patchkit", "revert", f"--{project}-src", state.parent)

    # Only libraries are replaced in any other package; its state folder is in its .dist-info.
    return quoted("patchkit", "native", state.parents[1], "--revert")


def ledger_path(state: Path) -> Path:
    return state / _NAME


def original_path(state: Path, path: str) -> Path:
    return state / _ORIGINALS / path


def read_ledger(state: Path, project: str) -> Ledger | None:
    """Return the ledger of a tree, None if there is none.

    Raises DriftError, which says how to revert, if a field is not as patchkit writes it.
    """
    place = ledger_path(state)
    # lexists: a dangling link counts as an unusable ledger, not as a missing one.
    if not os.path.lexists(place):
        return None

    try:
        return read_json(Ledger, read_text(place, limit=LARGEST_IN_TREE, follow=False))
    except (UsageError, SourceError) as error:
        problem = error.what.removeprefix(f"{place}: ")
    except RecordError as error:
        problem = f"not a ledger of this patchkit: {error}"
    raise unusable(state, project, problem)


def unusable(state: Path, project: str, what: str) -> DriftError:
    """Return the error for a ledger that cannot be used, with the command that reverts the tree."""
    return DriftError(
        f"{ledger_path(state)}: {what}",
        why="it was edited, or written by another version of patchkit",
        hint=f"put the originals back: {_revert_command(project, state)} --force",
    )


def originals(state: Path, ledger: Ledger) -> dict[str, bytes | None]:
    """Return upstream's content of each patched text file, None for a file that patchkit created.

    Raises HashMismatchError if an original is not the one that the ledger names.
    """
    texts: dict[str, bytes | None] = {}
    for path, (before, _after) in ledger.files.items():
        place = original_path(state, path)
        data = None
        # A path that is no file, or a file that is too large, counts as a missing original.
        with contextlib.suppress(UsageError, SourceError):
            data = read_bytes(place, limit=LARGEST_IN_TREE, follow=False)

        if digest(data) != before:
            raise damaged_original(place, path)
        texts[path] = data
    return texts


def damaged_original(place: Path, path: str) -> HashMismatchError:
    """Return the error for an original that is not what upstream shipped."""
    return HashMismatchError(
        f"{place}: is not the original of {path}",
        why="files in the ledger's folder were edited or removed",
        hint="unpack the release again, or install the package again",
    )


def digest_now(tree: SourceTree, path: str) -> str:
    """Return the sha256 of a file as it is now; "" if missing, "unreadable" if no plain file."""
    if not os.path.lexists(tree.root / path):
        return ""

    try:
        # Read in pieces: a library may be larger than the memory.
        return sha256_of(place_of(tree.root, path))
    except PatchkitError:
        return "unreadable"
