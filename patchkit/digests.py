"""Compute the SHA-256 of texts, of files and of folders."""

import hashlib
from pathlib import Path
from typing import Literal

from patchkit.errors import StorageError
from patchkit.records import Sha256

Digest = Sha256 | Literal[""]
"""The SHA-256 of a file, in hex, as records have it; "" for no file."""

# Folders that are not part of a release: git's history, patchkit's state, output of builds.
_ASIDE = (".git", ".patchkit", ".deps", "build")


def digest(data: bytes | str | None) -> str:
    """Return the SHA-256 of bytes, or of a text in UTF-8, as hex; "" for None."""
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


def sha256_if_readable(path: Path) -> str:
    """Return the SHA-256 of a file as hex, "" if it is no file, or cannot be read."""
    if not path.is_file():  # to open a pipe would wait for a writer
        return ""
    try:
        return sha256_of(path)
    except StorageError:
        return ""


def tree_digest(root: Path) -> str:
    """Return one SHA-256, as hex, of a folder's files: names, kinds, executable bits, contents.

    Copies of a folder have the same digest, whatever their places, times and owners. Of a link, its
    text counts, not the file it leads to. History and output of builds are left out.
    """
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*")}
    total = hashlib.sha256()
    # Sorted, since rglob yields paths in the order of the file system.
    for name, path in sorted(paths.items()):
        if name.partition("/")[0] in _ASIDE:
            continue

        if path.is_symlink():
            kind = "link"
            content = str(path.readlink()).encode()
        elif path.is_file():
            kind = "program" if path.stat().st_mode & 0o100 else "file"
            content = path.read_bytes()
        else:
            continue

        # A NUL ends the name, which may hold blanks and newlines, but no NUL. So two different
        # folders never give the same text.
        total.update(f"{kind} {name}\0{digest(content)}\n".encode())
    return total.hexdigest()
