"""Find installed distributions by their .dist-info folders: importlib.metadata loads slowly."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

_SUFFIX = ".dist-info"


@dataclass(frozen=True, slots=True)
class Owner:
    """A distribution that has installed a file."""

    project: str
    version: str

    def __str__(self) -> str:
        return f"{self.project} {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LostFile(Owner):
    """A file that a RECORD lists and that is gone: pip deleted it with another package's."""

    path: str

    def __str__(self) -> str:
        return f"{self.path}, which {self.project} {self.version} has installed"


def distributions(path: Iterable[str]) -> dict[str, tuple[Path, ...]]:
    """Return project, like ``nvidia_nccl_cu13`` → its folders on ``sys.path``; the first counts."""
    found: dict[str, tuple[Path, ...]] = {}
    for folder in dict.fromkeys(path):
        try:
            homes = sorted(Path(folder).iterdir())
        except OSError:  # sys.path may name archives, and folders that do not exist
            continue
        for home in homes:
            if home.name.endswith(_SUFFIX):
                whole = home.name.removesuffix(_SUFFIX)
                # The version is what follows the last dash; a damaged name may have none.
                project = (whole.rpartition("-")[0] or whole).lower()
                project = project.replace("-", "_").replace(".", "_")
                found[project] = (*found.get(project, ()), home)
    return found


def headers(home: Path, name: str) -> Iterator[str]:
    """Yield every value of a field of METADATA. After the first empty line comes prose."""
    for line in _file_lines(home / "METADATA"):
        field, _, value = line.partition(":")
        if field.strip().lower() == name.lower():
            yield value.strip()
        if not line.strip():
            break


def header(home: Path, name: str) -> str:
    """Return a field of METADATA, "" if there is none."""
    return next(headers(home, name), "")


def find_version(path: Iterable[str], *projects: str) -> str:
    """Return the version of the first of these projects that is installed, "" if none is."""
    found = distributions(path)
    homes = (home for project in projects for home in found.get(project, ()))
    return next(filter(None, (header(home, "Version") for home in homes)), "")


def owners(path: Iterable[str], stem: str) -> dict[str, tuple[Owner, ...]]:
    """Return real path → owners, of files below ``sys.path`` whose names begin with ``stem``."""
    found: dict[str, tuple[Owner, ...]] = {}
    homes = (home for homes in distributions(path).values() for home in homes)
    for home in sorted(homes):
        # A RECORD of torch has thousands of lines: only those that matter are parsed.
        lines = [line for line in _file_lines(home / "RECORD") if f"/{stem}" in line]
        project, _, version = home.name.removesuffix(_SUFFIX).rpartition("-")
        for row in csv.reader(lines):
            if Path(row[0]).name.startswith(stem):
                place = os.path.realpath(home.parent / row[0])
                owner = Owner(
                    header(home, "Name") or project, header(home, "Version") or version
                )
                if owner not in found.setdefault(place, ()):
                    found[place] += (owner,)
    return found


def lost_files(path: Iterable[str], stem: str) -> tuple[LostFile, ...]:
    """Return the files below ``sys.path``, by the begin of their names, that pip believes in."""
    gone = {
        place: its
        for place, its in owners(path, stem).items()
        if not os.path.lexists(place)
    }
    pairs = ((place, owner) for place, its in gone.items() for owner in its)
    return tuple(LostFile(path=place, **asdict(owner)) for place, owner in pairs)


def _file_lines(place: Path) -> list[str]:
    try:
        return place.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
