"""Compare two builds: are they the same bytes, and if not, what differs first."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path


def first_object(first: Mapping[str, str], second: Mapping[str, str]) -> str:
    """Return the first object that differs or that only one build has; "" if there is none."""
    return next(
        (name for name in sorted({*first, *second}) if first.get(name) != second.get(name)), ""
    )


def first_member(first: Path, second: Path) -> str:
    """Return what differs first between two wheels; "" if their bytes are the same."""
    if first.read_bytes() == second.read_bytes():
        return "the file name" if first.name != second.name else ""
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as two:
        names = one.namelist()
        if names != two.namelist():
            odd = sorted(set(names) ^ set(two.namelist()))
            return f"{odd[0]} is in one of them only" if odd else "the order of the members"
        for name in names:
            if one.read(name) != two.read(name):
                return name
    return "the zip's own fields, such as times and modes"
