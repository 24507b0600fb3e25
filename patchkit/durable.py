"""Files that outlast a crash: written as a whole under another name, synced, renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from patchkit.errors import StorageError


def write_new(path: Path, data: bytes, finish: Callable[[int], None]) -> None:
    """A file that must not be there yet, on the disk when this returns; private at first.

    ``finish`` gets the open file, to give it its owner and mode. Raises OSError.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        finish(file.fileno())
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Make the names in a folder last: renames and links are on the disk once it returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def translated(outcome: str) -> Iterator[None]:
    """OSError as StorageError, which says what has come of it."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{error.filename2 or error.filename or 'writing'}: {error.strerror}; {outcome}",
            hint="check permissions and free space, then run the same command again",
        ) from error
