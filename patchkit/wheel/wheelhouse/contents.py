"""The folder of finished wheels: each wheel listed, each listed wheel there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchkit.digests import sha256_of
from patchkit.durable.lock import locked
from patchkit.durable.names import is_file
from patchkit.errors import BusyError, HashMismatchError, SourceError, StorageError, UsageError
from patchkit.finding import Finding, finding
from patchkit.quoting import quoted
from patchkit.wheel.file.name import WheelName, wheel_name
from patchkit.wheel.file.record import faults
from patchkit.wheel.wheelhouse.manifest import (
    MANIFEST,
    Kind,
    ManifestEntry,
    device,
    documents,
    read_manifest,
    rivals,
    supersedes,
)
from patchkit.wheel.wheelhouse.own_files import LINKED, WHY_LINKED, read_own, require_own
from patchkit.wheel.wheelhouse.storage import (
    DAMAGED,
    JOURNAL,
    PATIENCE,
    clear,
    commit,
    held,
    journal,
    reading,
    recover,
    staged,
    writing,
)

FILLING = ".filling"
"""The folder in which a fill collects what it downloads; the next one goes on from there."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """A file that was removed, or would be, and why."""

    filename: str
    reason: str


def entries(house: Path) -> tuple[ManifestEntry, ...]:
    """The wheels that the manifest lists. Raises SourceError, StorageError, BusyError."""
    with reading(house):
        return _listed(house)


def settled(house: Path) -> tuple[ManifestEntry, ...]:
    """The same, once a change that was cut short is finished or undone; no wheel is a link."""
    with held(house):
        recover(house)
        for place in house.glob("*.whl"):
            require_own(place)
        return _listed(house)


def make_room(house: Path, filename: str) -> tuple[str, ...]:
    """Wheels that a wheel of this name would replace; ask before a long build.

    Raises UsageError if it cannot be held beside what is there, StorageError if nothing can be
    written there.
    """
    place = next(path for path in (house, *house.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise StorageError(
            f"{house}: no folder that can be written to",
            why=f"{place} is read-only" if place.is_dir() else f"{place} is a file",
            hint="name another one with --dir",
        )
    return _outdated(house, filename)


def _outdated(house: Path, filename: str) -> tuple[str, ...]:
    name, outdated = wheel_name(filename), []
    dependencies = {each.filename for each in _listed(house) if each.kind is not Kind.BUILT}
    for there in _known(house):
        taken = rivals(name, there) and there.filename in dependencies
        if taken or supersedes(name, there):
            outdated.append(there.filename)
        elif rivals(name, there):
            raise _refused(name, there, house)
    return tuple(outdated)


def add(
    house: Path,
    wheel: Path,
    facts: Mapping[str, Any],
    *,
    say: Callable[[str], None] = lambda _line: None,
    patience: float = PATIENCE,
) -> Path:
    """Put a finished wheel in its place, with what its builder knows of it (JSON).

    An older build of the same version gives way; ``say`` is told which. Raises UsageError if the
    wheel cannot be held beside another one, SourceError if it is damaged, StorageError for I/O,
    BusyError if somebody else writes for more than ``patience`` seconds.
    """
    name = wheel_name(wheel.name)
    with writing(house, patience):
        outdated = _outdated(house, name.filename)
        leaving, listed = {*outdated, name.filename}, _listed(house)
        stock = {entry.filename for entry in listed if entry.kind is not Kind.BUILT}
        kept = [entry for entry in listed if entry.filename not in leaving]
        with staged(house, wheel) as copy:
            if found := list(faults(copy)):
                raise SourceError(f"{wheel}: {found[0]}", why=_others(found), hint="build it again")
            size = copy.stat().st_size
            fresh = ManifestEntry(name=name, sha256=sha256_of(copy), size=size, facts=facts)
            commit(house, documents([*kept, fresh]), outdated, {name.filename: copy})
    for filename in outdated:
        older = f"an older build of {name.pinned}"
        say(f"{filename}: {'a dependency' if filename in stock else older}, replaced")
    return house / name.filename


def replace_dependencies(
    house: Path,
    built: Collection[ManifestEntry],
    fresh: Collection[ManifestEntry],
    sources: Collection[Path],
) -> None:
    """Put these dependencies in the place of those that are there, all or nothing.

    ``fresh`` were resolved for ``built``; ``sources`` are the files of those that are held and not
    in the folder yet, on the same file system. Raises BusyError if something else was built since.
    """
    with writing(house):
        listed = _listed(house)
        if _identities(listed) != _identities(built):
            raise BusyError(
                f"{house}: its wheels changed while their dependencies were resolved",
                why="a build put a wheel there, or one was dropped",
                hint=f"{_fill(house)}; once more",
            )
        kept = {entry.filename for entry in (*built, *fresh) if entry.held}
        gone = [entry.filename for entry in listed if entry.filename not in kept]
        arriving = {source.name: source for source in sources}
        commit(house, documents([*built, *fresh]), gone, arriving)


def _identities(entries: Iterable[ManifestEntry]) -> set[tuple[str, str]]:
    return {(each.filename, each.sha256) for each in entries if each.kind is Kind.BUILT}


def verify(house: Path) -> tuple[Finding, ...]:
    """Everything that is wrong with the files of a wheelhouse; ``wheel.verify`` looks into them.

    Raises SourceError, StorageError, BusyError.
    """
    with reading(house):
        listed = _listed(house)
        found = [*_leftovers(house)]
        for entry in listed:
            found += _entry_findings(house, entry)
        found += _unlisted_findings(house, {entry.filename for entry in listed})
        return (*found, *_stale(house, listed))


def prune(
    house: Path,
    *,
    drop: Collection[str] = (),
    dependencies: bool = False,
    dry_run: bool = False,
    force: bool = False,
    patience: float = PATIENCE,
) -> tuple[Pruned, ...]:
    """Remove what the manifest does not list, what an interrupted run left, and what is dropped.

    ``drop`` names wheels by file name, project, or project==version; ``dependencies`` drops all
    that ``fill`` brought. A listed wheel that is gone is listed no more, and the three files are
    written anew. ``force`` sets a journal aside that cannot be read. Raises as ``add`` does, and
    SourceError if no manifest tells what belongs here.
    """
    with reading(house, patience) if dry_run else held(house, patience):
        left = [Pruned(each.where, each.what) for each in _leftovers(house)]
        if not dry_run:
            if force:
                left += _set_aside(house)
            else:
                clear(house, DAMAGED)
            recover(house)
            _clear_filling(house)
        listed, dropped = _listed(house), _dropped(house, drop)
        dropped |= {
            each.filename for each in listed if dependencies and each.kind is not Kind.BUILT
        }
        _check_manifest(house, dropped)
        removed = _pruned(house, listed, dropped)
        gone = {each.filename for each in removed}
        kept = [entry for entry in listed if entry.filename not in gone]
        stale = [Pruned(each.where, "written anew") for each in _stale(house, kept)]
        if (stale or removed) and not dry_run:
            commit(house, documents(kept), sorted(gone))
    return (*left, *removed, *stale)


def _set_aside(house: Path) -> list[Pruned]:
    """Move a journal away; what it had begun shows in the findings of verify."""
    clear(house, DAMAGED)
    moved = journal(house).discard(house / DAMAGED)
    return [Pruned(JOURNAL, f"set aside as {DAMAGED}")] if moved else []


def _clear_filling(house: Path) -> None:
    if (house / FILLING).is_symlink():
        (house / FILLING).unlink()
    elif (house / FILLING).exists():
        with locked(house / FILLING):
            shutil.rmtree(house / FILLING, ignore_errors=True)


def _listed(house: Path) -> tuple[ManifestEntry, ...]:
    data = read_own(house / MANIFEST)
    return () if data is None else read_manifest(data)


def _known(house: Path) -> list[WheelName]:
    """Every wheel that is listed or there."""
    names = [entry.name for entry in _listed(house)] + list(_wheels(house))
    return list({name.filename: name for name in names}.values())


def _wheels(house: Path) -> Iterator[WheelName]:
    """Every wheel in the folder, listed or not, whose name says what it is."""
    for place in sorted(house.glob("*.whl")):
        with contextlib.suppress(SourceError):
            yield wheel_name(place.name)


def _refused(new: WheelName, old: WheelName, house: Path) -> UsageError:
    reason = "two versions of one project"
    if new.version.public == old.version.public:
        devices = " and ".join(sorted(filter(None, (device(new), device(old)))))
        both = device(new) and device(old)
        reason = f"builds for {devices}" if both else "stock and a build of ours are one version"
    return UsageError(
        f"{house} holds {old.filename}; {new.filename} cannot be added",
        why=f"pip, given both, finds no {new.project} to install (ResolutionImpossible): " + reason,
        hint=f"{_prune(house, '--drop', old.filename)}; or build into another folder",
    )


def _entry_findings(house: Path, entry: ManifestEntry) -> Iterator[Finding]:
    again = _again(house, entry)
    place = house / entry.filename
    if not os.path.lexists(place):
        if entry.held:
            hint = f"{again}; or: {_prune(house)}"
            yield finding(StorageError, entry.filename, "is listed, and not there", hint)
        return
    if not is_file(place):
        hint = f"{quoted('rm', '--', place)}; then {again}"
        yield finding(HashMismatchError, entry.filename, LINKED, hint, WHY_LINKED)
        return
    size = place.stat().st_size
    if size != entry.size and entry.held:
        what = f"has {size} bytes, {entry.size} in {MANIFEST}: it was changed or cut short"
        yield finding(HashMismatchError, entry.filename, what, again)
    elif (found := sha256_of(place)) != entry.sha256:
        what = (
            f"was changed: its sha256 begins with {found[:12]}, with {entry.sha256[:12]} in "
            f"{MANIFEST}"
        )
        yield finding(HashMismatchError, entry.filename, what, again)
    # What others released is as it is; its sha256 is all that there is to say.
    for fault in faults(place) if entry.kind is Kind.BUILT else ():
        yield finding(HashMismatchError, entry.filename, fault, again)


def _fill(house: Path) -> str:
    return quoted("patchkit", "wheelhouse", "fill", "--dir", house)


def _prune(house: Path, *options: str) -> str:
    return quoted("patchkit", "wheelhouse", "prune", "--dir", house, *options)


def _again(house: Path, entry: ManifestEntry) -> str:
    """How to come by a wheel once more."""
    facts = entry.facts
    if entry.kind is not Kind.BUILT:
        return _fill(house)
    if facts.get("made") == "repack":
        what = [f"vllm=={facts.get('version')}", "--cpu", str(facts.get("machine"))]
        return quoted("patchkit", "repack", *what, "--dir", house)
    return "build it again"


def _unlisted_findings(house: Path, listed: Collection[str]) -> Iterator[Finding]:
    names = list(_wheels(house))
    prune_it = f"move it away; or: {_prune(house)}"
    for place in sorted(house.glob("*.whl")):
        if place.name not in listed:
            kind = UsageError if is_file(place) else HashMismatchError
            what = f"is not in {MANIFEST}" if is_file(place) else LINKED
            yield finding(kind, place.name, what, prune_it)
    for number, one in enumerate(names):
        for other in names[number + 1 :]:
            if rivals(one, other):
                # The one that nobody made here has to go.
                gone, kept = sorted((one, other), key=lambda name: name.filename in listed)
                what = f"pip cannot resolve it beside {kept.filename} (ResolutionImpossible)"
                hint = _prune(house, "--drop", gone.filename)
                yield finding(UsageError, gone.filename, what, hint)


def _leftovers(house: Path) -> Iterator[Finding]:
    for name in (JOURNAL, DAMAGED):
        if os.path.lexists(house / name):
            hint = _prune(house)
            yield finding(StorageError, name, "left by an interrupted run", hint)
    if os.path.lexists(house / FILLING):
        hint = f"{_fill(house)}; or: {_prune(house)}"
        yield finding(StorageError, FILLING, "left by an interrupted fill, or one is at work", hint)


def _stale(house: Path, listed: Sequence[ManifestEntry]) -> Iterator[Finding]:
    if not listed and not (house / MANIFEST).exists():
        return
    for filename, text in documents(listed).items():
        place = house / filename
        if not is_file(place) or read_own(place) != text.encode():
            there = "does not say what belongs to these wheels" if is_file(place) else LINKED
            what = there if os.path.lexists(place) else "is missing"
            hint = f"`{_prune(house)}` writes it anew"
            yield finding(HashMismatchError, filename, what, hint)


def _check_manifest(house: Path, dropped: Collection[str]) -> None:
    others = [place for place in house.glob("*.whl") if place.name not in dropped]
    if others and not (house / MANIFEST).exists():
        raise SourceError(
            f"{house / MANIFEST}: is missing, so nothing tells which wheels belong here",
            why="it was deleted, or this is not a wheelhouse of patchkit",
            hint="remove the wheels by hand, or build them again",
        )


def _dropped(house: Path, drop: Collection[str]) -> set[str]:
    """File names of the wheels, listed or there, that ``drop`` names. Raises UsageError."""
    known = {name.filename: {name.filename, name.project, name.pinned} for name in _known(house)}
    for name in drop:
        if not any(name in names for names in known.values()):
            raise UsageError(
                f"no wheel here is called {name!r}", hint=f"there are {', '.join(known) or 'none'}"
            )
    return {filename for filename, names in known.items() if names & set(drop)}


def _pruned(house: Path, listed: Sequence[ManifestEntry], dropped: Collection[str]) -> list[Pruned]:
    names = {entry.filename for entry in listed}
    here = {entry.filename for entry in listed if entry.held}
    on_disk = {place.name for place in house.glob("*.whl")}
    return [
        *(Pruned(name, "dropped") for name in sorted(dropped)),
        *(Pruned(name, f"not in {MANIFEST}") for name in sorted(on_disk - names - {*dropped})),
        *(Pruned(name, "gone, listed no more") for name in sorted(here - on_disk - {*dropped})),
    ]


def _others(found: Sequence[str]) -> str:
    return f"and {len(found) - 1} faults more" if len(found) > 1 else "the wheel is damaged"
