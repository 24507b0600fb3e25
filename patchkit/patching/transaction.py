"""All-or-nothing changes to many files, finished by the next run if this one is killed.

Everything needed is staged below the state folder first; writing ``journal.json`` is the point of
no return. From then on the change is carried out file by file with renames, and can be repeated:
a file is either as before (to do) or as after (done). An I/O error puts everything back.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit.durable import sync, translated
from patchkit.errors import BusyError, DriftError, StorageError
from patchkit.source.tree import digest, inside

_FOLDER = "transaction"
_JOURNAL = "journal.json"
_BEFORE, _AFTER = "before", "after"


@dataclass(frozen=True, slots=True)
class Change:
    """One file, relative to the root, before and after; None where it does not exist."""

    path: str
    before: bytes | None
    after: bytes | None


@dataclass(frozen=True, slots=True)
class _Step:
    """A change as the journal names it: digests, ``""`` for a file that does not exist."""

    path: str
    before: str
    after: str


@contextlib.contextmanager
def locked(root: Path) -> Iterator[int]:
    """Hold the tree for one writer. Raises BusyError at once if another process has it.

    Yields the file descriptor of the lock; whoever inherits that holds the tree, too.
    """
    handle = os.open(root, os.O_RDONLY)
    try:
        _lock(root, handle)
        yield handle
    finally:
        os.close(handle)


def _lock(root: Path, handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError(
            f"{root}: another patchkit is working on this tree", hint="wait until it is done"
        ) from None


def interrupted(state: Path) -> bool:
    """Whether a commit was cut short after its point of no return."""
    return (state / _FOLDER / _JOURNAL).exists()


def recover(root: Path, state: Path) -> bool:
    """Finish what a killed run began, or clear away what it had only staged.

    Returns whether something was finished. Raises DriftError if a file was edited in between.
    """
    folder = state / _FOLDER
    if not interrupted(state):
        _clear(state)
        return False
    steps = [_Step(**step) for step in json.loads((folder / _JOURNAL).read_text())]
    with translated("an interrupted commit is still unfinished"):
        try:
            _carry_out(root, folder, steps)
        except _EditedError as error:
            raise DriftError(
                f"{error}: edited since an interrupted run",
                why="patchkit was killed in mid-commit, and the file was changed afterwards",
                hint=f"bring the file back to one of those in {folder}, then run again",
            ) from None
        _clear(state)
    return True


def commit(root: Path, state: Path, changes: Sequence[Change]) -> None:
    """Make all changes or none.

    Raises DriftError if a file is not as ``before`` says, StorageError if it cannot be written.
    """
    with translated("nothing was changed"):
        for change in changes:
            _check(root, change)
        folder = state / _FOLDER
        try:
            steps = _stage(root, folder, changes)
        except BaseException:
            _clear(state)
            raise
        try:
            _carry_out(root, folder, steps)
        except _EditedError as error:
            _undo(root, folder, steps)
            raise _changed_meanwhile(str(error)) from None
        except OSError:
            _undo(root, folder, steps)
            raise
        finally:
            _clear(state)


def _check(root: Path, change: Change) -> None:
    place = inside(root, change.path)
    if _digest(place) != digest(change.before):
        raise _changed_meanwhile(change.path)
    # Root may write anywhere; a file without a write bit is still not meant to be written.
    if change.before is not None and not place.stat().st_mode & 0o222:
        raise StorageError(
            f"{change.path}: is read-only; nothing was changed", hint=f"chmod u+w {place}"
        )


def _changed_meanwhile(path: str) -> DriftError:
    return DriftError(
        f"{path}: changed while patchkit was working; nothing else was changed",
        why="another program wrote to it",
        hint="run the same command again",
    )


def _stage(root: Path, folder: Path, changes: Sequence[Change]) -> list[_Step]:
    for side in (_BEFORE, _AFTER):
        (folder / side).mkdir(parents=True)
    for index, change in enumerate(changes):
        for side, data in ((_BEFORE, change.before), (_AFTER, change.after)):
            if data is not None:
                _write(folder / side / str(index), data)
        if change.before is not None:
            shutil.copymode(root / change.path, folder / _BEFORE / str(index))
    steps = [_Step(c.path, digest(c.before), digest(c.after)) for c in changes]
    draft = folder / "draft"
    _write(draft, json.dumps([{k: getattr(s, k) for k in s.__slots__} for s in steps]).encode())
    draft.rename(folder / _JOURNAL)
    sync(folder)
    return steps


class _EditedError(Exception):
    """A file is neither as before nor as after; its path is the message."""


def _carry_out(root: Path, folder: Path, steps: Sequence[_Step]) -> None:
    """Bring every file to its ``after``; those that are there already stay."""
    parents = set()
    for index, step in enumerate(steps):
        place = inside(root, step.path)
        found = _digest(place)
        if found not in (step.before, step.after):
            raise _EditedError(step.path)
        if found != step.after:
            _install(place, folder / _AFTER / str(index) if step.after else None, folder / "next")
            parents.add(place.parent)
    for parent in parents:
        sync(parent)


def _undo(root: Path, folder: Path, steps: Sequence[_Step]) -> None:
    """Bring every file that was changed back; renames only, since the disk may be full."""
    for index, step in reversed(list(enumerate(steps))):
        place = inside(root, step.path)
        if step.before != step.after == _digest(place):
            if step.before:
                (folder / _BEFORE / str(index)).replace(place)
            else:
                place.unlink()


def _install(place: Path, staged: Path | None, scratch: Path) -> None:
    if staged is None:
        place.unlink()
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    # The staged file stays where it is until the end: a second attempt may need it.
    scratch.unlink(missing_ok=True)
    os.link(staged, scratch)
    if place.exists():
        shutil.copymode(place, scratch)
    scratch.replace(place)


def _clear(state: Path) -> None:
    shutil.rmtree(state / _FOLDER, ignore_errors=True)
    for folder in sorted(state.rglob("*"), reverse=True):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    with contextlib.suppress(OSError):
        state.rmdir()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _digest(place: Path) -> str:
    return digest(place.read_bytes()) if place.is_file() else ""
