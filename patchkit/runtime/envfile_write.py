"""Writing an env file: looked at before, replaced as a whole, and never by surprise."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from patchkit.durable import sync, write_new
from patchkit.errors import StorageError, UsageError
from patchkit.runtime.envfile_header import untouched
from patchkit.runtime.secret_names import masked

_PRIVATE = 0o600


class Outcome(StrEnum):
    CREATED = "created"
    UNCHANGED = "unchanged"
    REPLACED = "replaced"


def write(path: Path, text: str, *, force: bool, private: bool) -> Outcome:
    """Put a file in place, all or nothing; ``private`` takes the rights of others away.

    A file that is there keeps its mode. Raises UsageError, with the difference, for one that
    patchkit did not write or that was edited since, unless ``force``; for a link and for what is no
    file in any case; StorageError if the disk or the rights fail, and then nothing has changed.
    """
    with _translated(path):
        status = _status(path)
        old = path.read_bytes() if status else b""
        if status and old == text.encode() and not _too_open(status, private=private):
            return Outcome.UNCHANGED
        if status and not force:
            _check(path, old.decode(errors="replace"), text)
        _replace(path, text.encode(), status, private=private)
    with _translated(path, "the new file is there, but may not outlast a power cut"):
        sync(path.parent)
    return Outcome.REPLACED if status else Outcome.CREATED


def _status(path: Path) -> os.stat_result | None:
    """None if nothing is there. Raises UsageError for what cannot be replaced by a file."""
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
        raise UsageError(f"{path}: is no file", hint="without -o the text goes to standard output")
    return status


def _too_open(status: os.stat_result, *, private: bool) -> bool:
    return private and bool(stat.S_IMODE(status.st_mode) & ~_PRIVATE)


def _check(path: Path, old: str, new: str) -> None:
    """Raises UsageError if somebody's work would be lost."""
    if old == new or untouched(old):
        return
    raise UsageError(
        f"{path}: is there already, with another content\n{_difference(path, old, new)}",
        why="patchkit did not write it, or it was edited since",
        hint="--force replaces it; or name another file",
    )


def _difference(path: Path, old: str, new: str) -> str:
    import difflib  # 5 ms, and seldom needed

    lines = difflib.unified_diff(
        [masked(line) for line in old.splitlines()],
        [masked(line) for line in new.splitlines()],
        fromfile=str(path),
        tofile="patchkit env",
        lineterm="",
    )
    return "\n".join(lines)


def _replace(path: Path, data: bytes, old: os.stat_result | None, *, private: bool) -> None:
    part = path.with_name(f".{path.name}.{os.urandom(8).hex()}.part")
    try:
        write_new(part, data, lambda handle: _give(handle, old, private=private))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _give(handle: int, old: os.stat_result | None, *, private: bool) -> None:
    """The owner and the mode of the file that is replaced; for a new one, what umask leaves."""
    if old is not None:
        with contextlib.suppress(PermissionError):  # only root may
            os.fchown(handle, old.st_uid, old.st_gid)
    mode = stat.S_IMODE(old.st_mode) if old else 0o666 & ~_umask()
    os.fchmod(handle, mode & _PRIVATE if private else mode)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def _translated(path: Path, outcome: str = "nothing was changed") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror or error}; {outcome}",
            hint="check that the folder is there, its permissions and free space",
        ) from None
