"""Installed distributions, by their .dist-info folders: nothing is imported."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_SUFFIX = ".dist-info"


def distributions(path: Iterable[str]) -> dict[str, tuple[Path, ...]]:
    """Project → its folders on ``sys.path``, in this order; the first one counts.

    The project is written as in the folder's name: ``nvidia_nccl_cu13``.
    """
    found: dict[str, tuple[Path, ...]] = {}
    for folder in dict.fromkeys(path):
        for name in _names(folder):
            if name.endswith(_SUFFIX):
                whole = name.removesuffix(_SUFFIX)
                project = (whole.rpartition("-")[0] or whole).lower()
                project = project.replace("-", "_").replace(".", "_")
                found[project] = (*found.get(project, ()), Path(folder, name))
    return found


def _names(folder: str) -> list[str]:
    try:
        return sorted(each.name for each in Path(folder).iterdir())
    except OSError:  # sys.path names archives and folders that do not exist, too
        return []


def header(home: Path, name: str) -> str:
    """A field of METADATA, ``""`` if there is none. What follows the first empty line is prose."""
    for line in _lines(home / "METADATA"):
        field, _, value = line.partition(":")
        if field.strip().lower() == name.lower():
            return value.strip()
        if not line.strip():
            break
    return ""


def holds(home: Path, member: str) -> bool:
    """Whether RECORD lists a file."""
    return any(line.startswith(f"{member},") for line in _lines(home / "RECORD"))


def _lines(place: Path) -> list[str]:
    try:
        return place.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
