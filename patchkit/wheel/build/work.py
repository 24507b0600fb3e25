"""Keep work folders at one path everywhere, since nvcc names static variables after paths."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from patchkit.durable.lock import locked
from patchkit.errors import StorageError, translated
from patchkit.quoting import quoted

WORK = Path("/var/tmp/patchkit")  # noqa: S108  (owner and mode are checked)
"""Below this everything is built; unlike /tmp it outlives a reboot, and is on a disk."""

_FACTS = "facts.json"
_STAGED = ".staged-"
_STALE = 86400  # seconds; nothing is staged for that long


@contextlib.contextmanager
def staging() -> Iterator[Path]:
    """Make a folder of this run, beside the work folders: what is staged in it moves by a rename.

    An OSError of the build, such as that of a full disk, becomes a StorageError.
    """
    _require_private(WORK)
    for stale in WORK.glob(f"{_STAGED}*"):
        with contextlib.suppress(FileNotFoundError):  # another build has just removed it
            # By age, since a folder that is staged now has no lock.
            if time.time() - stale.lstat().st_mtime > _STALE:
                shutil.rmtree(stale, ignore_errors=True)
    folder = tempfile.TemporaryDirectory(prefix=_STAGED, dir=WORK, ignore_cleanup_errors=True)
    with translated("the build is not finished", WORK), folder as made:
        yield Path(made)


@contextlib.contextmanager
def work_folder(
    root: Path, sources: Iterable[Path], facts: str, *, fresh: bool, free: int
) -> Iterator[Path]:
    """Hold a work folder for this build, with ``sources`` moved into it.

    An interrupted build with the same facts is gone on with; what is left of another one goes.
    ``free`` is how many bytes the disk must have left. Raises BusyError, StorageError.
    """
    _require_private(root)
    with locked(root) as handle:
        # The build holds the lock on if patchkit alone is killed (see make.run_build).
        os.set_inheritable(handle, True)
        known = root / _FACTS
        if fresh or not known.is_file() or known.read_text(encoding="utf-8") != facts:
            known.unlink(missing_ok=True)  # first: without it nothing is gone on with
            for entry in root.iterdir():
                is_folder = entry.is_dir() and not entry.is_symlink()
                shutil.rmtree(entry) if is_folder else entry.unlink()
            for source in sources:
                source.rename(root / source.name)
            known.write_text(facts, encoding="utf-8")
        if shutil.disk_usage(root).free < free:
            raise StorageError(f"{root}: less than {free >> 30} GiB free", hint="free some space")
        yield root


def emptied(folder: Path) -> Path:
    """Empty a folder and return it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _require_private(folder: Path) -> None:
    """Make the folder, or check that nobody else can write into it."""
    with translated("nothing was built", folder):
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        # lstat: in /var/tmp anybody may have put a link here, to a folder of ours.
        status = folder.lstat()
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or shared:
        raise StorageError(
            f"{folder} belongs to somebody else, or others may write into it",
            why="builds happen at this path on every machine, so that their bytes are the same",
            hint=f"let its owner remove it, or run as its owner: {quoted('ls', '-ld', folder)}",
        )
