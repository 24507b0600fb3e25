"""Remove from a wheelhouse what does not belong there."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from patchkit.durable.lock import locked
from patchkit.errors import SourceError, UsageError, translated
from patchkit.wheel.wheelhouse.contents import FILLING, known_wheels
from patchkit.wheel.wheelhouse.manifest import MANIFEST, listed_manifest, write_documents
from patchkit.wheel.wheelhouse.storage import (
    DAMAGED,
    JOURNAL,
    commit_files,
    hold_wheelhouse,
    open_for_reading,
    wheelhouse_journal,
)
from patchkit.wheel.wheelhouse.verify import find_leftovers, stale_documents


@dataclass(frozen=True, slots=True)
class Pruned:
    """A file that was removed, or would be, and why."""

    filename: str
    reason: str


def prune_wheelhouse(
    house: Path, *, drop: Collection[str] = (), dry_run: bool = False, force: bool = False
) -> tuple[Pruned, ...]:
    """Remove what the manifest does not list, what an interrupted run left, and what is dropped.

    ``drop`` names wheels by file name, project, or project==version. A wheel that is gone is no
    longer listed, and the three files are written anew. ``force`` sets a journal aside that cannot
    be read. Raises as ``add_wheel`` does, and SourceError if no manifest says what belongs here.
    """
    with open_for_reading(house) if dry_run else hold_wheelhouse(house):
        left = [Pruned(finding.where, finding.what) for finding in find_leftovers(house)]
        if not dry_run:
            left += _clear_leftovers(house, force=force)
        names = {
            wheel.filename: {wheel.filename, wheel.project, wheel.pinned}
            for wheel in known_wheels(house)
        }
        if unknown := set(drop).difference(*names.values()):
            hint = f"there are {', '.join(names) or 'none'}"
            raise UsageError(f"no wheel here is called {min(unknown)!r}", hint=hint)
        dropped = {filename for filename, of in names.items() if of & set(drop)}
        manifest = listed_manifest(house)
        listed = manifest.wheels
        there = {path.name for path in house.glob("*.whl")}
        if there - dropped and not (house / MANIFEST).exists():
            raise SourceError(
                f"{house / MANIFEST}: is missing, so nothing says which wheels belong here",
                why="it was deleted, or this is not a wheelhouse of patchkit",
                hint="remove the wheels by hand, or build them again",
            )
        held_names = {entry.filename for entry in listed if entry.held}
        unlisted = there - {entry.filename for entry in listed} - dropped
        removed = [
            *(Pruned(name, "dropped") for name in sorted(dropped)),
            *(Pruned(name, f"not in {MANIFEST}") for name in sorted(unlisted)),
            *(
                Pruned(name, "gone, listed no more")
                for name in sorted(held_names - there - dropped)
            ),
        ]
        gone = {file.filename for file in removed}
        left_there = tuple(entry for entry in listed if entry.filename not in gone)
        kept = replace(manifest, wheels=left_there)
        stale = [Pruned(finding.where, "written anew") for finding in stale_documents(house, kept)]
        if (stale or removed) and not dry_run:
            commit_files(house, write_documents(kept), sorted(gone))
    return (*left, *removed, *stale)


def _clear_leftovers(house: Path, *, force: bool) -> list[Pruned]:
    """Remove what interrupted runs left; a journal that is set aside leaves findings for verify."""
    with translated(at=house):
        if (house / DAMAGED).is_symlink():
            (house / DAMAGED).unlink()
    shutil.rmtree(house / DAMAGED, ignore_errors=True)
    moved = force and wheelhouse_journal(house).discard(house / DAMAGED)
    wheelhouse_journal(house).recover()
    # A link is removed itself: the lock would be taken where it leads.
    if (house / FILLING).is_symlink():
        (house / FILLING).unlink()
    elif (house / FILLING).exists():
        with locked(house / FILLING):
            shutil.rmtree(house / FILLING, ignore_errors=True)
    return [Pruned(JOURNAL, f"set aside as {DAMAGED}")] if moved else []
