"""Compare the arch lists of a tree with those of its release, to notice edits by hand."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from packaging.version import Version

from patchkit.errors import DriftError
from patchkit.recipes.vllm.archs import Group


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
    rows = _read_table(table, version)
    if not rows:
        return

    wrong = []
    for group in groups:
        key = [group.name, " ".join(group.switches), group.variable]
        # Several groups may agree in all three: they are in the order of the files.
        row = next((row for row in rows if row[:3] == key), None)
        title = f"{group.where}: {group.name} ({group.variable})"
        if row is None:
            wrong.append(f"{title} is new")
            continue

        rows.remove(row)
        archs = tuple(filter(None, row[3].split(";")))
        is_patched = frozenset(group.archs) in patched(replace(group, archs=archs))
        if group.archs != archs and not is_patched:
            built_for = ";".join(group.archs) or "nothing"
            stock = row[3] or "nothing"
            wrong.append(f"{title} is built for {built_for}, not for {stock}")

    wrong += [f"{name} ({variable}) is missing" for name, _, variable, _ in rows]
    if wrong:
        raise DriftError(
            "\n    ".join([f"the arch lists are not those of {version}:", *wrong]),
            why="a CMake file was edited by hand",
            hint="restore the CMake files from the release",
        )


def _read_table(table: Path, version: Version) -> list[list[str]]:
    """Return name, switches, variable and archs of each group of a release."""
    with table.open(encoding="utf-8", newline="") as file:
        return [
            [row["group"], row["switches"], row["variable"], row["archs"]]
            for row in csv.DictReader(file)
            if Version(row["since"]) <= version <= Version(row["until"])
        ]
