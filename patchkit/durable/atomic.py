"""Replace one file such that a reader sees the old or the new one: write beside it, then rename.

``replacing`` starts anew; ``continuing`` keeps the part that an earlier run wrote.
"""

import contextlib
import errno
import fcntl
import glob
import os
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
    """Open a new file that replaces ``path`` when the block ends; a failed block removes it.

    Owner, group and mode of the old file are kept. Without an old file, the mode comes from umask,
    and the owner is that of the folder if root writes. ``private`` removes the rights of group and
    others. Raises UsageError if ``path`` is a link or no regular file, OSError if nothing was
    changed, StorageError if the file was replaced but may not survive a power cut.
    """
    status_of_file(path)
    _sweep_parts(path)
    fresh, part = _new_part(path)
    with fresh:
        try:
            yield fresh
            _put_in_place(fresh, part, path, private=private)
        except BaseException:
            with contextlib.suppress(OSError):  # the next run removes it
                part.unlink(missing_ok=True)
            raise

    _sync_folder_of(path)


def _sweep_parts(path: Path) -> None:
    """Remove the parts of the same file that killed runs left: those that nobody has locked."""
    # A name may hold * or [.
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with contextlib.suppress(OSError):
            # O_NONBLOCK: a FIFO of such a name would wait for a writer.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(part, flags), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()


def _new_part(path: Path) -> tuple[IO[bytes], Path]:
    """Return a new file beside a path, open and locked, so that no other run removes it."""
    while True:
        part = path.with_name(f".{path.name}.{os.urandom(8).hex()}.part")
        fresh = open(part, "x+b", opener=lambda p, flags: os.open(p, flags, 0o600))  # noqa: SIM115
        if _lock_part(fresh, part):
            return fresh, part
        fresh.close()  # another run removed it before it was locked


def _sync_folder_of(path: Path) -> None:
    # fsync of a file does not make its name last; fsync of its folder does.
    with translated(f"{path} was written, but may not outlast a power cut"):
        sync(path.parent)


@contextlib.contextmanager
def continuing(path: Path) -> Iterator[IO[bytes]]:
    """Open ``.NAME.partial``, which replaces ``path`` when the block ends, to read and write it.

    It holds what an earlier run wrote. If the block fails, the partial file stays for the next run,
    unless it is empty or the disk is full. While another run has it, an empty file is opened
    instead. Raises as ``replacing`` does.
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

    # An interrupt between the two lines would report that nothing was changed.
    with deferred():
        part.replace(path)
        committed(f"{path} was written")


def status_of_file(path: Path) -> os.stat_result | None:
    """Return the status of a file that may be replaced, None if there is none.

    Raises UsageError if the path is a link or no regular file.
    """
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
    """Set owner, group and mode of an open file: those of the ``old`` file, or of a new one.

    A file that root makes, as under sudo, belongs to the owner of the ``folder``. ``mode`` replaces
    the mode of the old file, or the one from umask.
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
    """Write a file's bytes, or a folder's names, to the disk, so that they survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _lock_part(file: IO[bytes], part: Path) -> bool:
    """Lock an open file; return whether this run has it alone and it still is the file ``part``.

    Another run may hold it, or may have renamed or removed it after it was opened.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), part.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
