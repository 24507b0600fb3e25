"""Go on with a file that an earlier run left unfinished."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from patchkit.durable.atomic import give, replacing, status_of_file, sync
from patchkit.durable.failure import translated
from patchkit.durable.names import is_file
from patchkit.durable.signals import committed, deferred

_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextlib.contextmanager
def continuing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces ``path`` when the block ends, with what an earlier run left of it.

    It is ``.NAME.partial``, open for reading and writing; if the block fails, it stays as long as
    it holds something. A run beside another one of the same file starts from nothing. Raises as
    ``replacing`` does.
    """
    status_of_file(path)
    part = _part(path)
    if not is_file(part):  # a FIFO of that name would wait for a writer
        with contextlib.suppress(OSError):
            part.unlink()
    handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "r+b") as file:
        if _is_ours(file, part):
            try:
                yield file
                file.flush()
                give(file.fileno(), None, path.parent)
                os.fsync(file.fileno())
                with deferred():
                    part.replace(path)
                    committed(f"{path} was written")
            except BaseException as error:
                _keep(file, part, full=getattr(error, "errno", 0) in _FULL)
                raise
            with translated(f"{path} was written, but may not outlast a power cut"):
                sync(path.parent)
            return
    with replacing(path) as file:
        yield file


def kept(path: Path) -> int:
    """Return how many bytes of a file an earlier run left for the next one."""
    with contextlib.suppress(OSError):
        return _part(path).lstat().st_size
    return 0


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _keep(file: IO[bytes], part: Path, *, full: bool) -> None:
    """Leave the file if it holds something, unless it fills the disk."""
    with contextlib.suppress(OSError):
        if full or file.seek(0, os.SEEK_END) == 0:
            part.unlink(missing_ok=True)
        else:
            committed(f"{part} keeps what is there, for the next run")


def _is_ours(file: IO[bytes], part: Path) -> bool:
    """Lock the file; another run may hold it, or have given it its name in between."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), part.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
