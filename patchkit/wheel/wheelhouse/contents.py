"""Keep the folder of finished wheels: each wheel is listed, each listed wheel is there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from patchkit.digests import sha256_of
from patchkit.errors import BusyError, SourceError, StorageError, UsageError
from patchkit.wheel.file.metadata import find_faults
from patchkit.wheel.file.wheelfile import WheelName, wheel_name
from patchkit.wheel.wheelhouse.storage import (
    Kind,
    Manifest,
    ManifestEntry,
    commit_files,
    device_of,
    hold_wheelhouse,
    listed_manifest,
    open_for_reading,
    open_for_writing,
    require_own,
    rivals,
    stage_copy,
    wheelhouse_command,
    wheelhouse_journal,
    write_documents,
)

FILLING = ".filling"
"""The folder in which a fill collects what it downloads; the next one goes on from there."""


def load_manifest(house: Path) -> Manifest:
    """Read the manifest. Raises SourceError, StorageError, BusyError."""
    with open_for_reading(house):
        return listed_manifest(house)


def read_settled(house: Path) -> Manifest:
    """Finish or undo a change that was cut short, then read the manifest; no wheel is a link."""
    with hold_wheelhouse(house):
        wheelhouse_journal(house).recover()
        for path in house.glob("*.whl"):
            require_own(path)
        return listed_manifest(house)


def check_folder(house: Path) -> None:
    """Raise StorageError unless wheels can be written there; nothing is written to find out."""
    nearest = next(path for path in (house, *house.absolute().parents) if path.exists())
    if not nearest.is_dir():
        why = f"{nearest} is a file"
    elif not os.access(nearest, os.W_OK):
        why = f"{nearest} is read-only"
    elif not os.statvfs(nearest).f_blocks:
        why = f"{nearest} is not on a disk"  # as /proc and /sys, where root may write
    else:
        return
    raise StorageError(
        f"{house}: not a folder that can be written to",
        why=why,
        hint="name another one with --dir",
    )


def check_room(house: Path, filename: str) -> tuple[str, ...]:
    """Return the wheels that a wheel of this name would replace; ask before a long build.

    Raises UsageError if it cannot be held beside what is there, StorageError if nothing can be
    written there.
    """
    check_folder(house)
    return _find_outdated(house, wheel_name(filename))


def add_wheel(
    house: Path,
    wheel: Path,
    facts: Mapping[str, Any],
    *,
    say: Callable[[str], None] = lambda _line: None,
) -> Path:
    """Put a finished wheel into the wheelhouse, with what its builder knows of it (JSON).

    An older build of the same version gives way, which ``say`` reports. Raises UsageError if the
    wheel cannot be held beside another one, SourceError if it is damaged, StorageError for I/O,
    BusyError if somebody else writes for a minute.
    """
    name = wheel_name(wheel.name)
    with open_for_writing(house):
        outdated = _find_outdated(house, name)
        leaving, listed = {*outdated, name.filename}, listed_manifest(house)
        stock = {
            entry.filename for entry in listed.wheels if entry.kind is not Kind.BUILT
        }
        kept = [entry for entry in listed.wheels if entry.filename not in leaving]
        # The copy is checked and committed: the named file may change in between.
        with stage_copy(house, wheel) as copy:
            if found := list(find_faults(copy)):
                more = len(found) - 1
                why = f"and {more} faults more" if more else "the wheel is damaged"
                raise SourceError(
                    f"{wheel}: {found[0]}", why=why, hint="build it again"
                )
            size = copy.stat().st_size
            fresh = ManifestEntry(
                name=name, sha256=sha256_of(copy), size=size, facts=facts
            )
            now = replace(listed, wheels=(*kept, fresh))
            commit_files(house, write_documents(now), outdated, {name.filename: copy})
    for filename in outdated:
        older = f"an older build of {name.pinned}"
        say(f"{filename}: {'a dependency' if filename in stock else older}, replaced")
    return house / name.filename


def replace_dependencies(
    house: Path,
    before: Manifest,
    fresh: Collection[ManifestEntry],
    sources: Collection[Path],
) -> None:
    """Replace the dependencies that are there by these, all or nothing.

    ``fresh`` were resolved for what was built ``before``, and its overrides; ``sources`` are the
    files of those that are held and not in the folder yet, on the same file system. Raises
    BusyError if something else was built or overridden since.
    """
    with open_for_writing(house):
        listed = listed_manifest(house)
        now, then = (
            {*each.overrides}
            | {
                (entry.filename, entry.sha256)
                for entry in each.wheels
                if entry.kind is Kind.BUILT
            }
            for each in (listed, before)
        )
        # Resolving takes long and does not hold the wheelhouse, so that others can build.
        if now != then:
            raise BusyError(
                f"{house}: its wheels changed while their dependencies were resolved",
                why="a build put a wheel there, one was dropped, or a pin was overridden",
                hint=f"{wheelhouse_command('fill', house)}; once more",
            )
        built = (entry for entry in listed.wheels if entry.kind is Kind.BUILT)
        after = replace(listed, wheels=(*built, *fresh))
        kept = {entry.filename for entry in after.wheels if entry.held}
        gone = [entry.filename for entry in listed.wheels if entry.filename not in kept]
        arriving = {source.name: source for source in sources}
        commit_files(house, write_documents(after), gone, arriving)


def known_wheels(house: Path) -> list[WheelName]:
    """Return every wheel that is listed or in the folder."""
    names = [entry.name for entry in listed_manifest(house).wheels] + list(
        wheels_there(house)
    )
    return list({name.filename: name for name in names}.values())


def wheels_there(house: Path) -> Iterator[WheelName]:
    """Yield every wheel in the folder, listed or not, that is named as one."""
    for path in sorted(house.glob("*.whl")):
        with contextlib.suppress(SourceError):
            yield wheel_name(path.name)


def _find_outdated(house: Path, new: WheelName) -> tuple[str, ...]:
    outdated = []
    listed = listed_manifest(house).wheels
    dependencies = {entry.filename for entry in listed if entry.kind is not Kind.BUILT}
    for old in (old for old in known_wheels(house) if rivals(new, old)):
        public = new.version.public == old.version.public
        device = device_of(new)
        later = new.version == old.version or (device and device == device_of(old))
        if (public and later) or old.filename in dependencies:
            outdated.append(old.filename)
        else:
            reason = "two versions of one project"
            if public:
                devices = [name for name in (device_of(new), device_of(old)) if name]
                reason = "stock and a build of ours are one version"
                if len(devices) == 2:
                    reason = f"builds for {' and '.join(sorted(devices))}"
            drop = wheelhouse_command("prune", house, "--drop", old.filename)
            raise UsageError(
                f"{house} holds {old.filename}; {new.filename} cannot be added",
                why=f"pip, given both, finds no {new.project} to install (ResolutionImpossible): "
                + reason,
                hint=f"{drop}; or build into another folder",
            )
    return tuple(outdated)
