"""Find which installed distributions own a file, by their RECORDs."""

from __future__ import annotations

import base64
import binascii
import csv
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from patchkit.runtime.python.distributions import header


@dataclass(frozen=True, slots=True)
class Owner:
    """A distribution; ``sha256`` in hex is what its RECORD says of the file, ``""`` if nothing."""

    project: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.project} {self.version}"


def owners(path: Iterable[str], stem: str) -> dict[str, tuple[Owner, ...]]:
    """Return real path → owners, of files below ``sys.path`` whose names begin with ``stem``."""
    found: dict[str, tuple[Owner, ...]] = {}
    for folder in dict.fromkeys(path):
        for record in sorted(Path(folder).glob("*.dist-info/RECORD")):
            for place, owner in _recorded_files(record, stem):
                if owner not in found.setdefault(place, ()):
                    found[place] += (owner,)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LostFile:
    """A file that a RECORD lists and that is gone: pip deleted it with another package's."""

    path: str
    project: str
    version: str

    def __str__(self) -> str:
        return f"{self.path}, which {self.project} {self.version} has installed"

    def cure(self, python: str, house: str) -> tuple[str, ...]:
        """Return the command that installs it again; a wheel that was built is in ``house``."""
        built = ("--no-index", "--find-links", house) if "+" in self.version else ()
        again = ("-m", "pip", "install", "--force-reinstall", "--no-deps")
        return (python, *again, *built, f"{self.project}=={self.version}")


def lost_files(path: Iterable[str], stem: str) -> tuple[LostFile, ...]:
    """Return the files below ``sys.path``, by the begin of their names, that pip believes in."""
    return tuple(
        LostFile(path=place, project=owner.project, version=owner.version)
        for place, found in owners(path, stem).items()
        for owner in found
        if not os.path.lexists(place)
    )


def _recorded_files(record: Path, stem: str) -> Iterator[tuple[str, Owner]]:
    text = record.read_text(encoding="utf-8", errors="replace")
    # A RECORD of torch has thousands of lines: only those that matter are parsed.
    lines = [line for line in text.splitlines() if f"/{stem}" in line]
    for row in csv.reader(lines):
        if Path(row[0]).name.startswith(stem):
            place = os.path.realpath(record.parent.parent / row[0])
            yield (
                place,
                Owner(*_name_version(record.parent), _hex_digest(row[1] if len(row) > 1 else "")),
            )


def _name_version(home: Path) -> tuple[str, str]:
    """Return project and version of a .dist-info folder; by its name if METADATA is missing."""
    project, _, version = home.name.removesuffix(".dist-info").rpartition("-")
    return header(home, "Name") or project, header(home, "Version") or version


def _hex_digest(known: str) -> str:
    kind, _, digest = known.partition("=")
    try:
        # RECORD leaves the padding out; what is too much of it is ignored.
        return base64.urlsafe_b64decode(digest + "==").hex() if kind == "sha256" else ""
    except (ValueError, binascii.Error):
        return ""
