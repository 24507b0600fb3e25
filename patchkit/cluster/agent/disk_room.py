"""Say what is free on the disks of this node that a cluster writes to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRoom:
    """A disk by a folder on it: bytes that a user may write, of all; files that may be made.

    ``files`` is None where the file system has no such limit.
    """

    folder: str
    free: int
    total: int
    files: int | None


def disk_rooms(folders: Sequence[str]) -> Iterator[DiskRoom]:
    """Yield the disks of these folders, each once; of one that is not there that of its parent."""
    seen = set()
    for each in folders:
        place = Path(each).expanduser()
        nearest = next(folder for folder in (place, *place.parents) if folder.exists())
        device = nearest.stat().st_dev
        if device not in seen:
            seen.add(device)
            found = os.statvfs(nearest)
            yield DiskRoom(
                folder=str(nearest),
                free=found.f_bavail * found.f_frsize,
                total=found.f_blocks * found.f_frsize,
                files=found.f_favail if found.f_files else None,
            )
