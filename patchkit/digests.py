"""Compute the SHA-256 of texts, of files and of folders."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from patchkit.errors import StorageError
from patchkit.records import Sha256

Digest = Sha256 | Literal[""]
"""The digest of a file in records: hex, "" for no file."""

# Not upstream's: patchkit's own state, a history, and what builds leave behind.
_ASIDE = frozenset({".git", ".patchkit", "build"})


def digest(data: bytes | str | None) -> str:
    """Return the SHA-256 of bytes, or of a text's UTF-8 form, as hex; "" for no file."""
    if data is None:
        return ""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hex. Raises StorageError if it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error


def tree_digest(root: Path, aside: Collection[str] = ()) -> str:
    """Return a SHA-256, as hex, over a folder's files: names, kinds, executable bits, contents.

    It is the same for copies in different folders, whatever their times and owners. Links count as
    what they say, not as what they lead to. ``aside`` are more entries that do not count.
    """
    total = hashlib.sha256()
    for path in _files(root, _ASIDE.union(aside)):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            kind, content = "link", str(path.readlink()).encode()
        else:
            kind = "program" if path.stat().st_mode & 0o100 else "file"
            content = path.read_bytes()
        # A name may hold blanks and newlines, but no NUL: no two folders give the same text.
        total.update(f"{kind} {name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()


def _files(root: Path, aside: Collection[str]) -> list[Path]:
    """Return every file and link below a folder, in the same order on every machine."""
    tops = [entry for entry in root.iterdir() if entry.name not in aside]
    inside = []
    for top in tops:
        inside += [top] if top.is_symlink() or not top.is_dir() else [top, *top.rglob("*")]
    files = [path for path in inside if path.is_symlink() or path.is_file()]
    # The order of rglob is that of the file system.
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())
