"""Check which files may be written, replaced or removed below a root: plain names, no links."""

from __future__ import annotations

import stat
from pathlib import Path, PurePosixPath
from typing import Annotated

from patchkit.errors import SourceError
from patchkit.records import RecordError, Utf8


def plain(path: str) -> bool:
    """Return whether a path is relative, names something, and has one spelling: no ``..``."""
    parts = path.split("/")
    return bool(path) and "\0" not in path and not {"", ".", ".."}.intersection(parts)


def _require_plain(path: str) -> None:
    if not plain(path):
        raise RecordError("is not a plain relative path")


PlainPath = Annotated[Utf8, _require_plain]
"""A path of a record that leads nowhere but below the root."""


def is_file(place: Path) -> bool:
    """Return whether a path is itself a regular file: no link, no folder, no device."""
    try:
        return stat.S_ISREG(place.lstat().st_mode)
    except OSError:
        return False


def inside(root: Path, path: str) -> Path:
    """Return ``root/path``, refusing links: what they point at may belong to somebody else."""
    place = root / path
    # An absolute path replaces the root in `root / path`.
    if ".." in PurePosixPath(path).parts or root not in place.parents:
        raise SourceError(f"{path}: leads out of {root}")
    for parent in [place, *place.parents]:
        if parent == root:
            break
        if parent.is_symlink():
            raise SourceError(
                f"{path}: {parent.relative_to(root)} is a symbolic link to {parent.readlink()}",
                why="patchkit neither follows nor replaces links: their target may lie outside "
                "the tree",
                hint="replace the link by the file itself",
            )
    return place
