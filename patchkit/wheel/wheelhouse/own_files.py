"""Read the files of a wheelhouse: regular files in it, never links to what lies elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

from patchkit.durable.names import is_file
from patchkit.errors import HashMismatchError, SourceError
from patchkit.quoting import quoted
from patchkit.reading import read_bytes

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
