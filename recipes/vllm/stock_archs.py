"""Compare the arch lists of a tree with those of its release, to notice edits by hand."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from packaging.version import Version

from patchkit.errors import DriftError
from patchkit.frozen import Texts
from patchkit.recipes.vllm.archs import Group

# Group, switches, variable, and a number that counts the groups that agree in all three.
Key = tuple[str, str, str, int]


def check_stock(
    groups: Sequence[Group],
    table: Path,
    version: Version,
    patched: Callable[[Group], set[frozenset[str]]],
) -> None:
    """Raise DriftError, naming each group, if the archs of groups are not those of the release.

    ``table`` is a CSV file that tools/tables.py writes: the archs of each group for the first
    member of the device family, by ranges of releases (both ends included). ``patched`` returns the
    arch lists that a group of the table may have in a tree that is already patched. A release that
    the table does not have is not checked.
    """
    expected = _read_table(table, version)
    if not expected:
        return

    by_key: dict[Key, Group] = {}
    for group in groups:
        names = (group.name, " ".join(group.switches), group.variable)
        by_key[_next_key(by_key, *names)] = group

    wrong = [
        f"{name} ({variable}) is missing"
        for name, switches, variable, number in expected
        if (name, switches, variable, number) not in by_key
    ]

    for key, group in by_key.items():
        title = f"{group.where}: {group.name} ({group.variable})"
        if key not in expected:
            wrong.append(f"{title} is new")
            continue

        archs = expected[key]
        if group.archs == archs:
            continue
        if frozenset(group.archs) not in patched(replace(group, archs=archs)):
            wrong.append(
                f"{title} is built for {_archs_text(group.archs)}, not for {_archs_text(archs)}"
            )

    if wrong:
        raise DriftError(
            "\n    ".join([f"the arch lists are not those of {version}:", *wrong]),
            why="a CMake file was edited by hand",
            hint="restore the CMake files from the release",
        )


def _read_table(table: Path, version: Version) -> dict[Key, Texts]:
    """Return group → its archs in a release, as the table has them."""
    archs: dict[Key, Texts] = {}
    with table.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if Version(row["since"]) <= version <= Version(row["until"]):
                key = _next_key(archs, row["group"], row["switches"], row["variable"])
                archs[key] = tuple(filter(None, row["archs"].split(";")))
    return archs


def _next_key(keys: Collection[Key], group: str, switches: str, variable: str) -> Key:
    names = (group, switches, variable)
    return (*names, sum(key[:3] == names for key in keys))


def _archs_text(archs: Texts) -> str:
    return ";".join(archs) or "nothing"
