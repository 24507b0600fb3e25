"""Stage files for a journal: hard links, or copies with the same owner and mode."""

import os
import shutil
import stat
import tempfile
from functools import partial
from pathlib import Path
from typing import IO

from patchkit.durable.atomic import give, sync
from patchkit.durable.signals import deferred

# Less free space counts as a full disk: a tool that failed has removed its output since.
_LITTLE = 16 << 20  # bytes
_FEW = 64  # files


def second_name(source: Path, name: Path) -> None:
    """Make a hard link ``name`` to a file; copy the file if no link can be made.

    The content is on the disk when this returns. Raises OSError.
    """
    try:
        os.link(source, name, follow_symlinks=False)
        sync(name)
    except OSError:
        # Another file system, one without hard links, or fs.protected_hardlinks forbids them.
        name.unlink(missing_ok=True)
        copy_staged(source, name, source.stat(), name.parent)


def copy_staged(
    source: Path,
    name: Path,
    old: os.stat_result | None,
    folder: Path,
) -> None:
    """Copy a file, with owner and mode of the ``old`` one, or of a new one in ``folder``."""
    with source.open("rb") as stream:
        write_staged(name, stream, old, folder)


def write_staged(
    name: Path,
    stream: IO[bytes],
    old: os.stat_result | None,
    folder: Path,
) -> None:
    """Write a new file with owner and mode of the ``old`` one, or of a new one in ``folder``."""
    with open(name, "xb", opener=partial(os.open, mode=0o600)) as file:
        shutil.copyfileobj(stream, file, 1 << 20)
        file.flush()
        give(file.fileno(), old, folder)
        os.fsync(file.fileno())


def make_folders(folder: Path) -> None:
    """Make a folder and its parents; as root, each gets the owner of the folder above it."""
    if folder.is_dir():
        return

    make_folders(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:  # another run was quicker
        return

    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        mode = stat.S_IMODE(os.fstat(handle).st_mode)
        give(handle, None, folder.parent, mode=mode)
    finally:
        os.close(handle)


def is_full(place: Path) -> bool:
    """Return whether a disk is almost out of space or inodes: not every tool reports that."""
    disk = os.statvfs(place)
    if disk.f_bavail * disk.f_frsize < _LITTLE:
        return True
    return disk.f_files > 0 and disk.f_favail < _FEW


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder. Interrupts are held back while it is made and while it is removed."""

    def __init__(self) -> None:
        with deferred():
            super().__init__(prefix="patchkit-")

    def cleanup(self) -> None:
        """Remove the folder; ``with`` calls this at the end of the block."""
        with deferred():
            super().cleanup()
