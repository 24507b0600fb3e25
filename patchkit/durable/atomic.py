"""Replace one file, so that the old or the new one is there: write beside it, then rename.

``continuing`` goes on with what an earlier run left unfinished.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from patchkit.durable.paths import is_file
from patchkit.durable.signals import committed, deferred
from patchkit.errors import UsageError, translated

_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextlib.contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """Open a file that replaces ``path`` when the block ends; it is gone if the block fails.

    The owner, group and mode of a file that is replaced are kept; a new one gets what umask leaves,
    and the owner of its folder if root writes it. ``private`` takes the rights of others away.
    Raises UsageError for a link and anything else that is no file, OSError as long as nothing was
    changed, StorageError if it was and may not last.
    """
    status_of_file(path)
    _sweep_parts(path)
    fresh, part = _new_part(path)
    with fresh:
        try:
            yield fresh
            _put_in_place(fresh, part, path, private=private)
        except BaseException:
            with contextlib.suppress(OSError):  # what is left, the next run sweeps
                part.unlink(missing_ok=True)
            raise

    _sync_folder_of(path)


def _sweep_parts(path: Path) -> None:
    """Remove what killed runs left of the same file: parts that nobody holds."""
    # A name may hold * or [.
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with contextlib.suppress(OSError):
            # O_NONBLOCK: a FIFO of such a name would wait for a writer.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(part, flags), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()


def _new_part(path: Path) -> tuple[IO[bytes], Path]:
    """Return a new file beside a path, open and locked: no sweep takes it for a left one."""
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        fresh = open(part, "x+b", opener=lambda p, flags: os.open(p, flags, 0o600))  # noqa: SIM115
        if _lock_part(fresh, part):
            return fresh, part
        fresh.close()  # a sweep was quicker


def _sync_folder_of(path: Path) -> None:
    # fsync of a file does not make its name last; fsync of its folder does.
    with translated(f"{path} was written, but may not outlast a power cut"):
        sync(path.parent)


@contextlib.contextmanager
def continuing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces ``path`` when the block ends, with what an earlier run left of it.

    It is ``.NAME.partial``, open for reading and writing; if the block fails, it stays as long as
    it holds something. A run beside another one of the same file starts from nothing. Raises as
    ``replacing`` does.
    """
    status_of_file(path)
    part = path.with_name(f".{path.name}.partial")
    if not is_file(part):  # a FIFO of that name would wait for a writer
        with contextlib.suppress(OSError):
            part.unlink()

    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(part, flags, 0o600), "r+b") as file:
        if not _lock_part(file, part):
            with replacing(path) as fresh:
                yield fresh
            return

        try:
            yield file
            _put_in_place(file, part, path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                is_full = getattr(error, "errno", 0) in _FULL
                if is_full or file.seek(0, os.SEEK_END) == 0:
                    part.unlink(missing_ok=True)
                else:
                    committed(f"{part} keeps what is there, for the next run")
            raise

    _sync_folder_of(path)


def _put_in_place(
    file: IO[bytes],
    part: Path,
    path: Path,
    *,
    private: bool = False,
) -> None:
    file.flush()
    give(file.fileno(), status_of_file(path), path.parent, private=private)
    os.fsync(file.fileno())

    # An interrupt in between would say that nothing was changed.
    with deferred():
        part.replace(path)
        committed(f"{path} was written")


def status_of_file(path: Path) -> os.stat_result | None:
    """Return the status of a file that may be replaced, None for none. Raises UsageError."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None

    if stat.S_ISLNK(status.st_mode):
        raise UsageError(
            f"{path}: is a link to {path.readlink()}",
            why="replacing it would cut the link, and following it write where nobody looked",
            hint="name the file that it points to",
        )
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path}: is not a file", hint="name a file, or a new one")
    return status


def give(
    handle: int,
    old: os.stat_result | None,
    folder: Path,
    *,
    mode: int | None = None,
    private: bool = False,
) -> None:
    """Give an open file owner, group and mode: of the ``old`` one, or those of a new one.

    What root makes in somebody's folder, as under sudo, belongs to that somebody.
    """
    model = old
    if model is None and os.geteuid() == 0:
        model = folder.stat()
    if model is not None:
        with contextlib.suppress(PermissionError):  # a group that the user is not in
            os.fchown(handle, model.st_uid, model.st_gid)

    if mode is None and old:
        mode = stat.S_IMODE(old.st_mode)
    elif mode is None:
        umask = os.umask(0o077)  # it can only be read by setting it
        os.umask(umask)
        mode = 0o666 & ~umask

    # After chown, which clears the set-user-ID bits.
    os.fchmod(handle, mode & 0o600 if private else mode)


def sync(path: Path) -> None:
    """Make the bytes of a file last, or the names in a folder, as after a rename."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _lock_part(file: IO[bytes], part: Path) -> bool:
    """Lock the file; another run may hold it, or have renamed or removed it in between."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), part.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
