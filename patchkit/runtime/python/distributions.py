"""Find installed distributions by their .dist-info folders: importlib.metadata loads slowly."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, takewhile
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


def find_distributions(path: Iterable[str]) -> dict[str, tuple[Path, ...]]:
    """Return project, like ``nvidia_nccl_cu13`` → its folders on ``sys.path``; the first counts."""
    homes_by_project: dict[str, tuple[Path, ...]] = {}

    for folder in dict.fromkeys(path):
        for home in sorted(Path(folder).glob(f"*{_SUFFIX}")):
            name = home.name.removesuffix(_SUFFIX)
            # The version is what follows the last dash; a damaged name may have none.
            project = name.rpartition("-")[0] or name
            key = project.lower().replace("-", "_").replace(".", "_")
            homes_by_project[key] = (*homes_by_project.get(key, ()), home)

    return homes_by_project


def read_headers(home: Path, name: str) -> Iterator[str]:
    """Yield every value of a field of METADATA. After the first empty line comes prose."""
    for line in takewhile(str.strip, _read_lines(home / "METADATA")):
        field, _colon, value = line.partition(":")
        if field.strip().lower() == name.lower():
            yield value.strip()


def read_header(home: Path, name: str) -> str:
    """Return a field of METADATA, "" if there is none."""
    return next(read_headers(home, name), "")


def find_version(path: Iterable[str], *projects: str) -> str:
    """Return the version of the first of these projects that is installed, "" if none is."""
    homes_by_project = find_distributions(path)

    for project in projects:
        for home in homes_by_project.get(project, ()):
            if version := read_header(home, "Version"):
                return version

    return ""


def find_owners(path: Iterable[str], stem: str) -> dict[str, tuple[Owner, ...]]:
    """Return real path → owners, of files below ``sys.path`` whose names begin with ``stem``."""
    owners_by_file: dict[str, tuple[Owner, ...]] = {}

    for home in sorted(chain.from_iterable(find_distributions(path).values())):
        # A RECORD of torch has thousands of lines: only those that matter are parsed.
        lines = [line for line in _read_lines(home / "RECORD") if f"/{stem}" in line]

        for row in csv.reader(lines):
            if not Path(row[0]).name.startswith(stem):
                continue

            file = os.path.realpath(home.parent / row[0])
            owner = _read_owner(home)
            owners = owners_by_file.get(file, ())
            if owner not in owners:
                owners_by_file[file] = (*owners, owner)

    return owners_by_file


def _read_owner(home: Path) -> Owner:
    project, _dash, version = home.name.removesuffix(_SUFFIX).rpartition("-")

    return Owner(
        read_header(home, "Name") or project, read_header(home, "Version") or version
    )


def lost_files(path: Iterable[str], stem: str) -> tuple[LostFile, ...]:
    """Return the files below ``sys.path`` that pip believes in, and that are gone.

    ``stem`` is how their names begin.
    """
    files = []

    for place, owners in find_owners(path, stem).items():
        if not os.path.lexists(place):
            files += [LostFile(path=place, **asdict(owner)) for owner in owners]

    return tuple(files)


def _read_lines(place: Path) -> list[str]:
    try:
        return place.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
