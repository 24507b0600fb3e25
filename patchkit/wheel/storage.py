"""All-or-nothing changes to a folder of large files, finished by the next run if one is killed.

A change is prepared in ``.staged`` with everything that it needs; renaming that folder to
``.committed`` is the point of no return. What follows is only renaming and deleting, needs no
space, and can be repeated: the next writer finishes what a killed one began. Readers then say so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from patchkit.durable import sync
from patchkit.errors import BusyError, SourceError, StorageError
from patchkit.patching.transaction import locked

STAGED, _COMMITTED, _GONE = ".staged", ".committed", "gone"
PATIENCE = 60.0  # seconds; a change takes a few, and a build is too dear to lose to a lock
_PAUSE = 0.05  # seconds between two looks at the lock


@contextlib.contextmanager
def held(folder: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Hold the folder alone; wait for whoever has it. Raises BusyError, SourceError."""
    if not folder.is_dir():
        raise SourceError(f"{folder}: no such folder", hint="name the wheelhouse with --dir")
    deadline = time.monotonic() + patience
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(folder))
                break
            except BusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE)
        yield


@contextlib.contextmanager
def reading(folder: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Hold the folder; nothing is written. Raises StorageError if a change is unfinished."""
    with held(folder, patience):
        if (folder / _COMMITTED).exists():
            raise StorageError(
                f"{folder}: a change was cut short in mid-commit",
                why="patchkit was killed",
                hint=f"patchkit wheelhouse prune --dir {folder} finishes it; "
                "so does the next build",
            )
        yield


@contextlib.contextmanager
def writing(folder: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Hold the folder, made if need be and recovered."""
    with translated(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with held(folder, patience):
        recover(folder)
        yield


def recover(folder: Path) -> None:
    """Clear away what was only staged, finish what was committed."""
    with translated(folder):
        _clear(folder)
        if (folder / _COMMITTED).exists():
            _carry_out(folder)


@contextlib.contextmanager
def staged(folder: Path, source: Path) -> Iterator[Path]:
    """A private copy of a file, to be looked at and then committed; gone if that fails."""
    copy = folder / STAGED / source.name
    with _cleared_on_failure(folder):
        with translated(folder):
            copy.parent.mkdir()
            with source.open("rb") as original, copy.open("xb") as file:
                shutil.copyfileobj(original, file, 1 << 20)
                _flush(file)
        yield copy


@contextlib.contextmanager
def staged_links(folder: Path, sources: Iterable[Path]) -> Iterator[None]:
    """Further names for files of the same file system, to be committed; gone if that fails."""
    place = folder / STAGED
    with _cleared_on_failure(folder):
        with translated(folder):
            place.mkdir()
            for source in sources:
                with source.open("rb") as file:
                    os.fsync(file.fileno())
                (place / source.name).hardlink_to(source)
        yield


def commit(folder: Path, texts: Mapping[str, str], gone: Collection[str]) -> None:
    """Put what is staged and these texts in place, and remove what is ``gone``: all or nothing."""
    place = folder / STAGED
    with _cleared_on_failure(folder), translated(folder):
        place.mkdir(exist_ok=True)
        for filename, text in {**texts, _GONE: "\n".join(gone)}.items():
            with (place / filename).open("xb") as file:
                file.write(text.encode())
                _flush(file)
        sync(place)
        place.rename(folder / _COMMITTED)
    with translated(folder, "the change is prepared and not finished"):
        sync(folder)
        _carry_out(folder)


def _carry_out(folder: Path) -> None:
    committed = folder / _COMMITTED
    for name in (committed / _GONE).read_text(encoding="utf-8").split():
        (folder / name).unlink(missing_ok=True)
    for place in sorted(committed.iterdir()):
        if place.name != _GONE:
            place.replace(folder / place.name)
    sync(folder)
    # Removing a folder takes several steps: under this name an unfinished one does no harm.
    committed.rename(folder / STAGED)
    _clear(folder)


@contextlib.contextmanager
def _cleared_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _clear(folder)
        raise


def _clear(folder: Path) -> None:
    shutil.rmtree(folder / STAGED, ignore_errors=True)


@contextlib.contextmanager
def translated(folder: Path, outcome: str = "nothing was changed") -> Iterator[None]:
    """An OSError becomes a StorageError that says what it means for the folder."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{_reason(error, folder)}; {outcome}",
            hint="check permissions and free space, then run the same command again",
        ) from error


def _reason(error: OSError, folder: Path) -> str:
    if isinstance(error, shutil.Error):  # of several files; one will do
        return str(error.args[0][0][2])
    return f"{error.filename2 or error.filename or folder}: {error.strerror or error}"


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
