"""Add wheels to a wheelhouse, and keep its manifest equal to the wheels in the folder."""

import contextlib
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from patchkit.digests import sha256_of
from patchkit.errors import BusyError, SourceError, StorageError, UsageError
from patchkit.frozen import Texts
from patchkit.wheel.file.wheelfile import Facts, WheelName, find_faults
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

Say = Callable[[str], None]
"""A function that shows a line to the user."""
FILLING = ".filling"
"""The folder in which a fill collects downloads; after an interruption, the next fill continues."""


def load_manifest(house: Path) -> Manifest:
    """Read the manifest under the wheelhouse's lock.

    Raises SourceError if it cannot be read, HashMismatchError if it is a link, StorageError if a
    change of the wheelhouse is unfinished, BusyError if somebody else holds it, and UsageError if
    there is no such folder.
    """
    with open_for_reading(house):
        return listed_manifest(house)


def read_settled(house: Path) -> Manifest:
    """Recover an unfinished change, then read the manifest.

    Raises as ``load_manifest`` does, and HashMismatchError if a wheel is a link or a folder.
    """
    with hold_wheelhouse(house):
        wheelhouse_journal(house).recover()
        for path in house.glob("*.whl"):
            require_own(path)
        return listed_manifest(house)


def check_folder(house: Path) -> None:
    """Raise StorageError unless wheels can be written into a folder, which need not exist yet.

    Nothing is written to find out.
    """
    places = (house, *house.absolute().parents)
    nearest = next(path for path in places if path.exists())

    if obstacle := _write_obstacle(nearest):
        raise StorageError(
            f"{house}: not a folder that can be written to",
            why=f"{nearest} is {obstacle}",
            hint="name another one with --dir",
        )


def _write_obstacle(path: Path) -> str:
    """Return what keeps a folder from being written to, "" if nothing does."""
    if not path.is_dir():
        return "a file"
    if not os.access(path, os.W_OK):
        return "read-only"
    # os.access lets root write into /proc and /sys; such file systems have no blocks.
    return "" if os.statvfs(path).f_blocks else "not on a disk"


def check_room(house: Path, filename: str) -> Texts:
    """Return the names of the wheels that a wheel called ``filename`` would replace.

    A build calls this before its long work. Raises UsageError if the wheel cannot be added because
    of another one, SourceError if the name is malformed, StorageError if nothing can be written
    into the folder.
    """
    check_folder(house)
    return _find_outdated(house, WheelName(filename))


def add_wheel(
    house: Path,
    wheel: Path,
    facts: Facts,
    *,
    say: Say = lambda _line: None,
) -> Path:
    """Put a finished wheel into the wheelhouse and the manifest; return its path there.

    ``facts`` are what the builder states about it (JSON). An older build of the same version, and a
    dependency of the same project, are replaced; ``say`` is called with a line for each. Raises
    UsageError if the wheel cannot be added because of another one, SourceError if it is damaged,
    StorageError for I/O, BusyError if another process keeps the folder locked for a minute.
    """
    name = WheelName(wheel.name)
    with open_for_writing(house):
        listed = listed_manifest(house)
        outdated = _find_outdated(house, name)
        leaving = {*outdated, name}
        staying = [entry for entry in listed.wheels if entry.name not in leaving]

        # What is checked and committed is a copy, since the original may change in between.
        with stage_copy(house, wheel) as copy:
            for fault in find_faults(copy):
                what = f"{wheel}: {fault}"
                why = "the wheel is damaged"
                raise SourceError(what, why=why, hint="build it again")

            fresh = ManifestEntry(
                name=name,
                sha256=sha256_of(copy),
                size=copy.stat().st_size,
                facts=facts,
            )
            after = replace(listed, wheels=(*staying, fresh))
            commit_files(house, write_documents(after), outdated, {name: copy})

    for filename in outdated:
        is_stock = filename in _dependencies(listed)
        replaced = "a dependency" if is_stock else f"an older build of {name.pinned}"
        say(f"{filename}: {replaced}, replaced")

    return house / name


def replace_dependencies(
    house: Path,
    before: Manifest,
    fresh: Collection[ManifestEntry],
    sources: Collection[Path],
) -> None:
    """Replace the dependencies of a wheelhouse by ``fresh`` ones, all or nothing.

    ``before`` is the manifest for whose built wheels and overrides they were resolved. ``sources``
    are the files that are not in the folder yet, on the same file system. Raises BusyError if a
    built wheel or an override changed since ``before``.
    """
    with open_for_writing(house):
        listed = listed_manifest(house)
        # Resolving takes long and leaves the wheelhouse unlocked, so a build may have changed it.
        if _decisions(listed) != _decisions(before):
            raise BusyError(
                f"{house}: its wheels changed while their dependencies were resolved",
                why="a build put a wheel there, one was dropped, or a pin was overridden",
                hint=f"{wheelhouse_command('fill', house)}; once more",
            )

        after = replace(listed, wheels=(*listed.built, *fresh))
        held = {entry.name for entry in after.wheels if entry.held}
        gone = [entry.name for entry in listed.wheels if entry.name not in held]
        arriving = {source.name: source for source in sources}
        commit_files(house, write_documents(after), gone, arriving)


def _decisions(manifest: Manifest) -> set[object]:
    """Return what decides which dependencies are needed: the overrides and the built wheels."""
    built = {(entry.name, entry.sha256) for entry in manifest.built}
    return {*manifest.overrides, *built}


def known_wheels(house: Path) -> list[WheelName]:
    """Return the name of every wheel that is listed or in the folder."""
    names = [entry.name for entry in listed_manifest(house).wheels]
    for path in sorted(house.glob("*.whl")):
        with contextlib.suppress(SourceError):  # no wheel has such a name
            names.append(WheelName(path.name))
    return list(dict.fromkeys(names))


def _find_outdated(house: Path, new: WheelName) -> Texts:
    """Return the file names of the wheels that a new wheel replaces.

    Dependencies and older builds are replaced. Raises UsageError if another wheel of the same
    project and CPU is in the way.
    """
    dependencies = _dependencies(listed_manifest(house))
    outdated = []

    for old in known_wheels(house):
        if not rivals(new, old):
            continue
        if old in dependencies or _is_older_build(new, old):
            outdated.append(old)
            continue

        drop = wheelhouse_command("prune", house, "--drop", old)
        raise UsageError(
            f"{house} holds {old}; {new} cannot be added",
            why=f"pip, given both, finds no {new.project} to install (ResolutionImpossible)",
            hint=f"{drop}; or build into another folder",
        )

    return tuple(outdated)


def _dependencies(manifest: Manifest) -> set[str]:
    return {entry.name for entry in manifest.dependencies}


def _is_older_build(new: WheelName, old: WheelName) -> bool:
    is_same_release = new.version.public == old.version.public
    return is_same_release and device_of(new) == device_of(old)
