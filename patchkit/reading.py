"""Read files that others made, if they are regular files of a bounded size.

A path that a user names, or in a tree, may lead to an endless device, a FIFO that nobody writes to,
or a file larger than memory. None of these blocks this process or fills its memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from patchkit.errors import SourceError, StorageError, UsageError
from patchkit.frozen import Values
from patchkit.quoting import quoted

if TYPE_CHECKING:
    import ast  # at run time it is imported where it is used, since few callers need it

LARGEST = 4 << 20
"""Most bytes of a text file that a user names: env files, scripts, ledgers, facts of machines."""

LARGEST_IN_TREE = 64 << 20
"""Most bytes of a text file in a tree, a package or a wheelhouse: sources, RECORD, a manifest."""

_STDIN = "standard input"
_HINT = "name a regular file"
_PIECE = 1 << 20  # bytes
_PACKED = {
    "gzip": (b"\x1f\x8b", "zcat"),
    "zstd": (b"\x28\xb5\x2f\xfd", "zstdcat"),
    "xz": (b"\xfd7zXZ", "xzcat"),
}
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


def read_bytes(
    path: Path | None,
    *,
    limit: int = LARGEST,
    follow: bool = True,
    hint: str = _HINT,
) -> bytes:
    """Return the contents of a regular file of at most ``limit`` bytes; None is standard input.

    ``follow`` allows the last part of the path to be a symbolic link: True for a path that a user
    named, False in a tree. ``hint`` is the hint of a UsageError. Raises UsageError if the path does
    not lead to a regular file, SourceError if the file is too large, StorageError if it cannot be
    read.
    """
    with _opened(path, hint, follow=follow) as file:
        data = file.read(limit + 1)  # one more byte shows that the file is too large

    if len(data) > limit:
        size = f"{limit >> 20} MiB" if limit >> 20 else f"{limit} bytes"
        raise SourceError(
            f"{path or _STDIN}: is larger than {size}",
            why="no file of this kind is that large",
            hint="name the file that was meant",
        )
    return data


def read_text(
    path: Path | None,
    *,
    limit: int = LARGEST,
    follow: bool = True,
    hint: str = _HINT,
) -> str:
    """Return the text of a file. Raises as ``read_bytes``, and SourceError if it is not UTF-8."""
    data = read_bytes(path, limit=limit, follow=follow, hint=hint)
    return decoded(data, str(path or _STDIN))


def read_chunks(path: Path, *, reader: str, hint: str = _HINT) -> Iterator[bytes]:
    """Yield a file of any size in pieces of a megabyte; the path ``-`` is standard input.

    Raises as ``read_bytes`` does, and SourceError for a compressed file. Then the hint pipes the
    decompressed file into ``reader``, a command of patchkit that reads standard input.
    """
    if str(path) == "-":
        yield from iter(lambda: os.read(0, _PIECE), b"")
        return

    with _opened(path, hint) as file:
        first_piece = file.read(_PIECE)
        for kind, (magic, program) in _PACKED.items():
            if first_piece.startswith(magic):
                raise SourceError(
                    f"{path}: is compressed with {kind}",
                    hint=f"{quoted(program, path)} | {reader}",
                )

        yield first_piece
        yield from iter(lambda: file.read(_PIECE), b"")


def read_strings(path: Path) -> list[str]:
    """Return the strings of a file of /proc, where NUL ends each; of 4 MiB. Raises OSError."""
    with path.open("rb") as file:
        text = file.read(LARGEST).decode(errors="replace")

    return [string for string in text.split("\0") if string]


def read_environment(process: int | None) -> Values:
    """Return the variables of a process. Raises OSError if they are hidden, or there is none."""
    pairs = read_strings(Path(f"/proc/{process}/environ"))
    return dict(pair.partition("=")[::2] for pair in pairs)


def decoded(data: bytes, where: str) -> str:
    """Return UTF-8 bytes as text. Raises SourceError, naming ``where`` and the line, for others."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SourceError(
            f"{where}:{line}: is not UTF-8",
            why="it is not a text, or an editor wrote it in another encoding",
            hint="save it as UTF-8",
        ) from None


# Cached, since plan and proofs read the same files; a forked child begins with its parent's trees.
@lru_cache(maxsize=32)
def parse_python(text: str | bytes) -> ast.Module:
    """Return Python code as a syntax tree, which nobody may change in this process.

    Raises SyntaxError, also for too deep nesting: for that CPython itself raises MemoryError or
    RecursionError, by its version.
    """
    import ast

    try:
        return ast.parse(text)
    except (MemoryError, RecursionError):
        raise SyntaxError("it is nested too deeply", (None, 1, 0, "")) from None


def user_path(text: str) -> Path:
    """Return the path that a user names; ~NAME of an unknown user stays as it is."""
    return Path(os.path.expanduser(text))  # noqa: PTH111  (Path's own raises RuntimeError for it)


def require_file(path: Path, hint: str) -> None:
    """Raise as ``read_bytes`` does unless a path leads to a regular file that can be opened."""
    with _opened(path, hint):
        pass


@contextlib.contextmanager
def _opened(path: Path | None, hint: str, *, follow: bool = True) -> Iterator[BinaryIO]:
    if path is None:
        yield sys.stdin.buffer
        return

    try:
        handle = _open_regular(path, hint, follow=follow)
        with os.fdopen(handle, "rb") as file:
            yield file
    # A ValueError means that the path contains a NUL.
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise UsageError(f"{path}: no such file", hint=hint) from None
    except OSError as error:
        if error.errno == errno.ELOOP:  # the path is a link, and O_NOFOLLOW refuses it
            problem = f"{path}: is a symbolic link, not a file"
            raise UsageError(problem, hint=hint) from None
        raise StorageError(
            f"{path}: cannot be read: {error.strerror or error}",
            hint="check its permissions",
        ) from None


def _open_regular(path: Path, hint: str, *, follow: bool) -> int:
    """Open a regular file and return its descriptor.

    Raises UsageError for another kind of file, OSError if it cannot be opened.
    """
    # With O_NONBLOCK, a FIFO without a writer does not block. With O_NOCTTY, a terminal does not
    # become the controlling terminal of this process.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if not follow:
        flags |= os.O_NOFOLLOW
    handle = os.open(path, flags)
    # Ask the open file, not the path, which may lead to another file by now.
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle

    os.close(handle)
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    raise UsageError(f"{path}: is {kind}, not a file", hint=hint)
