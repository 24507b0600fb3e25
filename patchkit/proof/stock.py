"""What known releases build, so that a hand-edited arch list is noticed."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.version import Version

from patchkit.errors import DriftError
from patchkit.proof.archs import Group

COLUMNS = ("since", "until", "group", "variable", "archs")
Row = tuple[str, str, str]  # group, variable, archs


def check_stock(groups: Sequence[Group], table: Path, version: Version) -> None:
    """Compare what a known release's tree builds with the table.

    ``table`` is a CSV of COLUMNS: what each group gets for the family's first member, by ranges of
    releases (inclusive). Raises DriftError that names every group that differs.
    """
    with table.open(encoding="utf-8", newline="") as file:
        expected = sorted(
            (row["group"], row["variable"], row["archs"])
            for row in csv.DictReader(file)
            if Version(row["since"]) <= version <= Version(row["until"])
        )
    found = sorted(map(_row, groups))
    if wrong := [*_extra(found, expected, "is"), *_extra(expected, found, "should be")]:
        raise DriftError(
            "\n    ".join([f"the arch lists are not those of {version}:", *wrong]),
            why="a CMake file was edited by hand",
            hint="restore the CMake files from the release",
        )


def render_stock(releases: Iterable[tuple[str, Sequence[Group]]]) -> str:
    """The table for releases in ascending order, one row per run of releases that agree."""
    rows: list[list[str]] = []
    running: dict[tuple[Row, int], list[str]] = {}
    for version, groups in releases:
        now = _numbered(sorted(map(_row, groups)))
        running = {key: row for key, row in running.items() if key in now}
        for key in now:
            if key not in running:
                running[key] = [version, version, *key[0]]
                rows.append(running[key])
            running[key][1] = version
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([COLUMNS, *rows])
    return out.getvalue()


def _row(group: Group) -> Row:
    return group.name, group.variable, ";".join(group.archs)


def _numbered(rows: Sequence[Row]) -> list[tuple[Row, int]]:
    return [(row, rows[:index].count(row)) for index, row in enumerate(rows)]


def _extra(these: Sequence[Row], those: Sequence[Row], verb: str) -> list[str]:
    other = _numbered(those)
    extra = [row for row, number in _numbered(these) if (row, number) not in other]
    return [
        f"{name} ({variable}) {verb} built for {archs or 'none'}" for name, variable, archs in extra
    ]
