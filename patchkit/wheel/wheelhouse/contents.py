"""Add wheels to a wheelhouse: each wheel is listed, each listed wheel is there."""

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
    places = (house, *house.absolute().parents)
    nearest = next(path for path in places if path.exists())

    if obstacle := _write_obstacle(nearest):
        raise StorageError(
            f"{house}: not a folder that can be written to",
            why=f"{nearest} is {obstacle}",
            hint="name another one with --dir",
        )


def _write_obstacle(path: Path) -> str:
    """Return why nothing can be written into a folder, "" if it can."""
    if not path.is_dir():
        return "a file"
    if not os.access(path, os.W_OK):
        return "read-only"
    # Root may write into /proc and /sys, which hold no blocks.
    return "" if os.statvfs(path).f_blocks else "not on a disk"


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
    """Put a finished wheel into the wheelhouse, with the facts of its builder (JSON).

    An older build of the same version gives way, which ``say`` reports. Raises UsageError if the
    wheel cannot be held beside another one, SourceError if it is damaged, StorageError for I/O,
    BusyError if somebody else writes for a minute.
    """
    name = wheel_name(wheel.name)
    with open_for_writing(house):
        listed = listed_manifest(house)
        outdated = _find_outdated(house, name)
        leaving = {*outdated, name.filename}
        staying = [entry for entry in listed.wheels if entry.filename not in leaving]

        # The copy is checked and committed: the named file may change in between.
        with stage_copy(house, wheel) as copy:
            _require_whole(wheel, copy)
            fresh = ManifestEntry(
                name=name,
                sha256=sha256_of(copy),
                size=copy.stat().st_size,
                facts=facts,
            )
            after = replace(listed, wheels=(*staying, fresh))
            commit_files(house, write_documents(after), outdated, {name.filename: copy})

    for filename in outdated:
        is_stock = filename in _dependencies(listed)
        replaced = "a dependency" if is_stock else f"an older build of {name.pinned}"
        say(f"{filename}: {replaced}, replaced")
    return house / name.filename


def _require_whole(wheel: Path, copy: Path) -> None:
    for fault in find_faults(copy):
        raise SourceError(
            f"{wheel}: {fault}", why="the wheel is damaged", hint="build it again"
        )


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
        # Resolving takes long and does not hold the wheelhouse, so that others can build.
        if _decisions(listed) != _decisions(before):
            raise BusyError(
                f"{house}: its wheels changed while their dependencies were resolved",
                why="a build put a wheel there, one was dropped, or a pin was overridden",
                hint=f"{wheelhouse_command('fill', house)}; once more",
            )

        after = replace(listed, wheels=(*listed.built, *fresh))
        held = {entry.filename for entry in after.wheels if entry.held}
        gone = [entry.filename for entry in listed.wheels if entry.filename not in held]
        arriving = {source.name: source for source in sources}
        commit_files(house, write_documents(after), gone, arriving)


def _decisions(manifest: Manifest) -> set[object]:
    """Return what decides about dependencies: the overrides, and the wheels that were built."""
    built = {(entry.filename, entry.sha256) for entry in manifest.built}
    return {*manifest.overrides, *built}


def known_wheels(house: Path) -> list[WheelName]:
    """Return every wheel that is listed or in the folder."""
    listed = [entry.name for entry in listed_manifest(house).wheels]
    names = [*listed, *wheels_there(house)]
    return list({name.filename: name for name in names}.values())


def wheels_there(house: Path) -> Iterator[WheelName]:
    """Yield every wheel in the folder, listed or not, that is named as one."""
    for path in sorted(house.glob("*.whl")):
        with contextlib.suppress(SourceError):
            yield wheel_name(path.name)


def _find_outdated(house: Path, new: WheelName) -> tuple[str, ...]:
    """Return the wheels that a new one replaces. Raises UsageError for one that it does not."""
    dependencies = _dependencies(listed_manifest(house))
    outdated = []

    for old in known_wheels(house):
        if not rivals(new, old):
            continue
        if old.filename in dependencies or _is_older_build(new, old):
            outdated.append(old.filename)
            continue

        drop = wheelhouse_command("prune", house, "--drop", old.filename)
        raise UsageError(
            f"{house} holds {old.filename}; {new.filename} cannot be added",
            why=f"pip, given both, finds no {new.project} to install (ResolutionImpossible): "
            + _rivalry(new, old),
            hint=f"{drop}; or build into another folder",
        )

    return tuple(outdated)


def _dependencies(manifest: Manifest) -> set[str]:
    return {entry.filename for entry in manifest.dependencies}


def _is_older_build(new: WheelName, old: WheelName) -> bool:
    if new.version == old.version:
        return True
    device = device_of(new)

    is_same_device = bool(device) and device == device_of(old)
    return is_same_device and new.version.public == old.version.public


def _rivalry(new: WheelName, old: WheelName) -> str:
    """Return why a wheelhouse cannot hold both."""
    if new.version.public != old.version.public:
        return "two versions of one project"

    devices = sorted(filter(None, (device_of(new), device_of(old))))
    if len(devices) == 2:
        return f"builds for {' and '.join(devices)}"
    return "stock and a build of ours are one version"
