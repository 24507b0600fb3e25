"""Know what releases build, so that a hand-edited arch list is noticed."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from packaging.version import Version

from patchkit.errors import DriftError
from patchkit.recipes.vllm.archs import Group

Key = tuple[
    str, str, str, int
]  # group, switches, variable, which one of those that agree


def check_stock(
    groups: Sequence[Group],
    table: Path,
    version: Version,
    patched: Callable[[Group], set[frozenset[str]]],
) -> None:
    """Compare what a known release's tree builds with the table.

    ``table`` is a CSV that tools/tables.py writes: what each group gets for the family's first
    member, by ranges of releases (inclusive). ``patched`` says what a group of the table may get in
    a tree that is patched already. Raises DriftError that names every group that differs.
    """
    expected: dict[Key, tuple[str, ...]] = {}
    with table.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if Version(row["since"]) <= version <= Version(row["until"]):
                archs = tuple(filter(None, row["archs"].split(";")))
                name = (row["group"], row["switches"], row["variable"])
                expected[*name, sum(key[:3] == name for key in expected)] = archs
    found: dict[Key, Group] = {}
    for group in groups:
        name = (group.name, " ".join(group.switches), group.variable)
        found[*name, sum(key[:3] == name for key in found)] = group
    if not expected:  # not added to the tables yet: nobody knows what it builds
        return
    wrong = [f"{key[0]} ({key[2]}) is missing" for key in expected if key not in found]
    for key, group in found.items():
        if key not in expected:
            wrong.append(f"{group.where}: {group.name} ({group.variable}) is new")
        elif group.archs != (archs := expected[key]) and frozenset(
            group.archs
        ) not in patched(replace(group, archs=archs)):
            wrong.append(
                f"{group.where}: {group.name} ({group.variable}) is built for "
                f"{';'.join(group.archs) or 'nothing'}, not for {';'.join(archs) or 'nothing'}"
            )
    if wrong:
        raise DriftError(
            "\n    ".join([f"the arch lists are not those of {version}:", *wrong]),
            why="a CMake file was edited by hand",
            hint="restore the CMake files from the release",
        )
