"""SHA-256 of texts, of files and of folders."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from patchkit.errors import StorageError
from patchkit.records import Sha256

Digest = Sha256 | Literal[""]
"""What ``digest`` returns, as records that name files have it."""

# Not upstream's: patchkit's own state, a history, and what builds leave behind.
_ASIDE = frozenset({".git", ".patchkit", "build"})


def digest(data: bytes | str | None) -> str:
    """Return the SHA-256 of bytes, or of a text's UTF-8 form, as hex; "" for no file."""
    if data is None:
        return ""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def sha256_of(path: Path) -> str:
    """Of a file, in hex. Raises StorageError if it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error


def tree_digest(root: Path, aside: Collection[str] = ()) -> str:
    """sha256 over names, kinds, executable bits and contents of a folder's files, in hex.

    The same for copies in different places, whatever their times and owners. Links count as what
    they say, not as what they lead to. ``aside`` are more entries of the folder that do not count.
    """
    total = hashlib.sha256()
    for path in _files(root, _ASIDE.union(aside)):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            kind, content = "link", str(path.readlink()).encode()
        else:
            kind = "program" if path.stat().st_mode & 0o100 else "file"
            content = path.read_bytes()
        total.update(f"{kind} {name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()


def _files(root: Path, aside: Collection[str]) -> list[Path]:
    """Every file and link below a folder, in one order on every machine."""
    tops = [entry for entry in root.iterdir() if entry.name not in aside]
    inside = [path for top in tops for path in ([top, *top.rglob("*")] if _real(top) else [top])]
    files = [path for path in inside if path.is_symlink() or path.is_file()]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _real(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
