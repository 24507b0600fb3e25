"""Hold a wheelhouse on the disk by one process, and change it through a journal of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from patchkit.digests import digest, sha256_of
from patchkit.durable.atomic import give
from patchkit.durable.journal import Change, Journal
from patchkit.durable.lock import locked
from patchkit.durable.names import is_file, place_of, present
from patchkit.durable.staging import make_folders
from patchkit.errors import HashMismatchError, SourceError, UsageError, translated
from patchkit.quoting import quoted
from patchkit.reading import read_bytes

JOURNAL = ".journal"
DAMAGED = ".journal.damaged"
"""Where a journal goes that nobody can read."""
DOCUMENTS = frozenset({"manifest.json", "requirements.txt", "SHA256SUMS"})
_PATIENCE = 60.0  # seconds; a change takes a few, and a build is too dear to lose to a lock


def wheelhouse_command(verb: str, folder: Path, *options: str) -> str:
    """Return the command line of ``patchkit wheelhouse VERB``, for hints."""
    return quoted("patchkit", "wheelhouse", verb, "--dir", folder, *options)


def wheelhouse_journal(folder: Path) -> Journal:
    """Return the journal of a wheelhouse; it changes plain names of the folder itself alone."""
    return Journal(
        root=folder,
        folder=folder / JOURNAL,
        again=wheelhouse_command("prune", folder),
        rescue=wheelhouse_command("prune", folder, "--force"),
        allowed=lambda path: "/" not in path and (path in DOCUMENTS or path.endswith(".whl")),
    )


@contextlib.contextmanager
def hold_wheelhouse(folder: Path) -> Iterator[None]:
    """Hold the folder alone; wait for whoever has it. Raises BusyError, UsageError."""
    if not folder.is_dir():
        make = quoted("patchkit", "repack", "vllm==X.Y.Z", "--dir", folder)
        raise UsageError(
            f"{folder}: no such folder", hint=f"name a wheelhouse that is there; or make it: {make}"
        )
    with locked(folder, _PATIENCE):
        yield


@contextlib.contextmanager
def open_for_reading(folder: Path) -> Iterator[None]:
    """Hold the folder; nothing is written. Raises StorageError if a change is unfinished."""
    with hold_wheelhouse(folder):
        wheelhouse_journal(folder).check_finished()
        yield


@contextlib.contextmanager
def open_for_writing(folder: Path) -> Iterator[None]:
    """Hold the folder, made if need be and recovered."""
    with translated(at=folder):
        make_folders(folder)
    with hold_wheelhouse(folder):
        wheelhouse_journal(folder).recover()
        yield


@contextlib.contextmanager
def stage_copy(folder: Path, source: Path) -> Iterator[Path]:
    """Make a private copy of a file, to be looked at and then committed; gone afterwards."""
    copy = wheelhouse_journal(folder).folder / "new" / source.name
    try:
        with translated(at=folder):
            make_folders(copy.parent)
            # x: what is there already is somebody else's, and not written over or through.
            with source.open("rb") as original, copy.open("xb") as file:
                shutil.copyfileobj(original, file, 1 << 20)
                give(file.fileno(), None, folder)
                file.flush()
                os.fsync(file.fileno())
        yield copy
    finally:
        with contextlib.suppress(OSError):  # what is left, the next writer clears away
            wheelhouse_journal(folder).clear_staged()


def commit_files(
    folder: Path,
    texts: Mapping[str, str],
    gone: Collection[str],
    arriving: Mapping[str, Path] | None = None,
) -> None:
    """Put files and texts in place by name, and remove what is ``gone``: all or nothing.

    ``arriving`` files lie on the file system of the folder, and get a further name.
    """
    new = {name: text.encode() for name, text in texts.items()} | dict(arriving or {})
    changes = []
    for name, after in {**dict.fromkeys(gone), **new}.items():
        if (folder / name).is_symlink():  # it holds nothing, and where it leads is not ours
            with translated(at=folder):
                (folder / name).unlink()
        before = present(place_of(folder, name))
        same = before and before == (sha256_of(after) if isinstance(after, Path) else digest(after))
        if not same and (before or after is not None):
            changes.append(Change(name, before, after))
    wheelhouse_journal(folder).commit(changes)


LINKED = "is a link, a folder or a device, not a file of this wheelhouse"
WHY_LINKED = "patchkit makes none; what it leads to can change without the wheelhouse"
_MOST = 32 << 20  # bytes of a document; a manifest of 200 wheels has 0.1 MB


def require_own(place: Path) -> None:
    """Raise HashMismatchError if something is there that is not itself a regular file."""
    if os.path.lexists(place) and not is_file(place):
        raise HashMismatchError(
            f"{place}: {LINKED}",
            why=WHY_LINKED,
            hint=f"{quoted('ls', '-l', place)}; then put the file itself in its place",
        )


def read_own(place: Path) -> bytes | None:
    """Return the content of a document of a wheelhouse, None if there is none.

    Raises HashMismatchError for a link or a file larger than 32 MiB, StorageError for I/O.
    """
    if not os.path.lexists(place):
        return None
    require_own(place)
    try:
        return read_bytes(place, limit=_MOST, follow=False)
    except SourceError as error:
        raise HashMismatchError(
            error.what,
            why="patchkit did not write it",
            hint="get the wheelhouse again from where it was made",
        ) from None
