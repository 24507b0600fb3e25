"""Translate what a failing disk says: one translation of OSError for everybody."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from patchkit.errors import StorageError

NOTHING = "nothing was changed"
_LITTLE, _FEW = 16 << 20, 64  # bytes and files: a tool that fails clears away what it had written
_HINT = "check permissions and free space, then run the same command again"


@contextlib.contextmanager
def translated(outcome: str = NOTHING, at: Path | None = None, hint: str = _HINT) -> Iterator[None]:
    """Raise an OSError as a StorageError that says what has come of it, and what to do.

    ``at`` is named where the error itself names no file.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(f"{reason(error, at)}; {outcome}", hint=hint) from error


def reason(error: OSError, at: Path | None = None) -> str:
    """Return ``FILE: what the system says`` of an OSError."""
    if isinstance(error, shutil.Error):  # of several files; one will do
        return str(error.args[0][0][2])
    # filename2 is the target of a rename or a link.
    where = error.filename2 or error.filename or at or "writing"
    return f"{where}: {error.strerror or error}"


def is_full(place: Path) -> bool:
    """Return whether a disk has next to no room, or no room for files: not every tool says so."""
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize < _LITTLE or (disk.f_files > 0 and disk.f_favail < _FEW)
