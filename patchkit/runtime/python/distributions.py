"""Find installed distributions by their .dist-info folders: importlib.metadata loads slowly."""

import csv
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, takewhile
from pathlib import Path

from patchkit.frozen import positional

_SUFFIX = ".dist-info"


@positional
class Owner:
    """A distribution, and the file that it has installed."""

    project: str
    version: str
    path: str

    def __str__(self) -> str:
        return f"{self.project} {self.version}"


def find_distributions(path: Iterable[str]) -> dict[str, tuple[Path, ...]]:
    """Return the .dist-info folders of each project, in the order of ``path`` (``sys.path``).

    Keys are names such as ``nvidia_nccl_cu13``. Python uses the first folder.
    """
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
    """Yield every value of a header field of METADATA, in ``home``, a .dist-info folder."""
    # The header ends at the first empty line; the description follows.
    for line in takewhile(str.strip, read_lines(home / "METADATA")):
        field, _colon, value = line.partition(":")
        if field.strip().lower() == name.lower():
            yield value.strip()


def read_header(home: Path, name: str) -> str:
    """Return the first value of a header field of METADATA, "" if there is none."""
    return next(read_headers(home, name), "")


def find_version(path: Iterable[str], *projects: str) -> str:
    """Return the version of the first project of ``projects`` that is installed, "" if none is."""
    homes_by_project = find_distributions(path)

    for project in projects:
        for home in homes_by_project.get(project, ()):
            if version := read_header(home, "Version"):
                return version

    return ""


def find_owners(path: Iterable[str], stem: str) -> dict[str, tuple[Owner, ...]]:
    """Return the distributions that list each file whose name begins with ``stem``, by real path.

    ``path`` is ``sys.path``. The files need not exist.
    """
    owners_by_file: dict[str, tuple[Owner, ...]] = {}

    for home in sorted(chain.from_iterable(find_distributions(path).values())):
        # torch's RECORD has thousands of lines, so select the lines before parsing them as CSV.
        lines = [line for line in read_lines(home / "RECORD") if f"/{stem}" in line]

        for row in csv.reader(lines):
            if not Path(row[0]).name.startswith(stem):
                continue

            file = os.path.realpath(home.parent / row[0])
            owner = Owner(read_header(home, "Name"), read_header(home, "Version"), file)
            owners = owners_by_file.get(file, ())
            if owner not in owners:
                owners_by_file[file] = (*owners, owner)

    return owners_by_file


def lost_files(path: Iterable[str], stem: str) -> tuple[Owner, ...]:
    """Return the files that a RECORD lists and that do not exist, with their distributions.

    Pip deleted them when it uninstalled another package that has a file of the same path.
    ``path`` is ``sys.path``; only file names that begin with ``stem`` are looked at.
    """
    owners = chain.from_iterable(find_owners(path, stem).values())
    return tuple(owner for owner in owners if not os.path.lexists(owner.path))


def read_lines(place: Path) -> list[str]:
    """Return the lines of a file, none if it cannot be read, or is none: a FIFO would block."""
    with suppress(OSError):  # is_file raises in another user's folder
        if place.is_file():
            return place.read_text("utf-8", "replace").splitlines()
    return []
