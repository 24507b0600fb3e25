"""Go on with a file that an earlier run left unfinished."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from patchkit.durable.atomic import give, replacing, sync
from patchkit.durable.signals import committed, deferred


@contextlib.contextmanager
def continuing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces ``path`` when the block ends, with what an earlier run left of it.

    It is ``.NAME.partial``, open for reading and writing; if the block fails, it stays as long as
    it holds something. A run beside another one of the same file starts from nothing. Raises
    OSError.
    """
    part = path.with_name(f".{path.name}.partial")
    with open(part, "r+b", opener=_made) as file:
        if _is_ours(file, part):
            try:
                yield file
                file.flush()
                give(file.fileno(), None, path.parent)
                os.fsync(file.fileno())
                with deferred():
                    part.replace(path)
                    committed(f"{path} was written")
            except BaseException:
                with contextlib.suppress(OSError):
                    if file.seek(0, os.SEEK_END) == 0:
                        part.unlink(missing_ok=True)
                raise
            sync(path.parent)
            return
    with replacing(path) as file:
        yield file


def _made(place: str, _flags: int) -> int:
    return os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _is_ours(file: IO[bytes], part: Path) -> bool:
    """Lock the file; another run may hold it, or have given it its name in between."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), part.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
