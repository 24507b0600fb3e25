"""Decide which files below a root may be changed: plain paths, no links."""

import stat
from pathlib import Path, PurePosixPath
from typing import Annotated

from patchkit.digests import sha256_of
from patchkit.errors import DriftError, SourceError
from patchkit.records import RecordError, Utf8

_LONGEST_NAME = 255  # bytes: NAME_MAX of every file system of Linux
_LONGEST_PATH = 1024  # bytes: below a root it must fit into PATH_MAX, which is 4,096


def is_plain(path: str) -> bool:
    """Return whether a path is relative, without ``.``, ``..``, empty parts and NUL.

    A path that is too long is not plain either.
    """
    parts = path.encode(errors="surrogatepass").split(b"/")
    if len(path) > _LONGEST_PATH or max(map(len, parts)) > _LONGEST_NAME:
        return False

    return "\0" not in path and not {b"", b".", b".."}.intersection(parts)


def _require_plain(path: str) -> None:
    if not is_plain(path):
        raise RecordError("is not a plain relative path")


PlainPath = Annotated[Utf8, _require_plain]
"""A relative path in a record that cannot lead out of its root."""


def is_file(place: Path) -> bool:
    """Return whether a path is itself a regular file: no link, no folder, no device."""
    try:
        return stat.S_ISREG(place.lstat().st_mode)
    except OSError:
        return False


def place_inside(root: Path, path: str) -> Path:
    """Return ``root/path``. Raises SourceError if it leads out of the root, or through a link."""
    place = root / path
    # An absolute path replaces the root in `root / path`.
    if ".." in PurePosixPath(path).parts or root not in place.parents:
        raise SourceError(f"{path}: leads out of {root}")

    for parent in [place, *place.parents]:
        if parent == root:
            break
        if parent.is_symlink():
            link = parent.relative_to(root)
            raise SourceError(
                f"{path}: {link} is a symbolic link to {parent.readlink()}",
                why="patchkit neither follows nor replaces links: their target may lie outside "
                "the tree",
                hint="replace the link by the file itself",
            )
    return place


def place_of(root: Path, path: str) -> Path:
    """Return ``root/path``, a regular file or a path without a file.

    Raises SourceError as ``place_inside`` does; DriftError if the path, or a parent of it, is of
    another kind.
    """
    place = place_inside(root, path)

    count = len(PurePosixPath(path).parts) - 1
    for folder in place.parents[:count]:
        if is_file(folder):
            raise DriftError(
                f"{path}: {folder.relative_to(root)} is a file, and no folder",
                why="the path is that of another release, or is mistyped",
                hint=f"look at {folder}",
            )

    if place.exists() and not place.is_file():
        raise DriftError(
            f"{path}: is not a file",
            why="a folder or a device stands where the release has a file",
            hint=f"look at {place}, and move it away",
        )
    return place


def file_digest(place: Path) -> str:
    """Return the sha256 of a file, "" if there is none."""
    return sha256_of(place) if place.exists() else ""
