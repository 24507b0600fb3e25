"""Verify a wheelhouse, and remove from it what does not belong there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from patchkit.digests import sha256_of
from patchkit.durable.lock import locked
from patchkit.durable.paths import is_file
from patchkit.errors import (
    HashMismatchError,
    ProofError,
    SourceError,
    StorageError,
    UsageError,
    translated,
)
from patchkit.finding import Finding, finding
from patchkit.quoting import quoted
from patchkit.wheel.device.first_use import jit_entries
from patchkit.wheel.device.inspect import prove_exact
from patchkit.wheel.device.libraries import check_wheel, judge_libraries, missed
from patchkit.wheel.file.metadata import find_faults
from patchkit.wheel.wheelhouse.contents import (
    FILLING,
    known_wheels,
    load_manifest,
    wheels_there,
)
from patchkit.wheel.wheelhouse.overrides import known_overrides
from patchkit.wheel.wheelhouse.pins import (
    TORCH,
    ListedWheel,
    all_pins,
    disagreements,
    is_nccl,
    read_listed_wheels,
)
from patchkit.wheel.wheelhouse.storage import (
    DAMAGED,
    JOURNAL,
    LINKED,
    MANIFEST,
    WHY_LINKED,
    Kind,
    Manifest,
    ManifestEntry,
    Override,
    commit_files,
    hold_wheelhouse,
    listed_manifest,
    open_for_reading,
    read_own,
    rivals,
    wheelhouse_command,
    wheelhouse_journal,
    write_documents,
)


def check_files(house: Path) -> tuple[Finding, ...]:
    """Find everything that is wrong with the files of a wheelhouse; ``verify`` looks into them.

    Raises SourceError, StorageError, BusyError.
    """
    with open_for_reading(house):
        listed = listed_manifest(house)
        found = [*find_leftovers(house)]
        for entry in listed.wheels:
            found += _entry_findings(house, entry)
        known = {entry.filename for entry in listed.wheels}
        prune = f"move it away; or: {wheelhouse_command('prune', house)}"
        for path in sorted(house.glob("*.whl")):
            if path.name not in known:
                kind = UsageError if is_file(path) else HashMismatchError
                what = f"is not in {MANIFEST}" if is_file(path) else LINKED
                found.append(finding(kind, path.name, what, prune))
        for one, other in combinations(wheels_there(house), 2):
            if rivals(one, other):
                # The one that nobody made here has to go.
                gone, kept = sorted(
                    (one, other), key=lambda name: name.filename in known
                )
                what = f"pip cannot resolve it beside {kept.filename} (ResolutionImpossible)"
                hint = wheelhouse_command("prune", house, "--drop", gone.filename)
                found.append(finding(UsageError, gone.filename, what, hint))
        return (*found, *stale_documents(house, listed))


def _entry_findings(house: Path, entry: ManifestEntry) -> Iterator[Finding]:
    path, facts, again = house / entry.filename, entry.facts, "build it again"
    if entry.kind is not Kind.BUILT:
        again = wheelhouse_command("fill", house)
    elif facts.get("made") == "repack":
        spec = [f"vllm=={facts.get('version')}", "--cpu", str(facts.get("machine"))]
        again = quoted("patchkit", "repack", *spec, "--dir", house)
    if not os.path.lexists(path):
        if entry.held:
            hint = f"{again}; or: {wheelhouse_command('prune', house)}"
            yield finding(
                StorageError, entry.filename, "is listed, and not there", hint
            )
        return
    if not is_file(path):
        hint = f"{quoted('rm', '--', path)}; then {again}"
        yield finding(HashMismatchError, entry.filename, LINKED, hint, WHY_LINKED)
        return
    size = path.stat().st_size
    # The size comes first: a file that was cut short need not be hashed.
    if size != entry.size and entry.held:
        what = (
            f"has {size} bytes, {entry.size} in {MANIFEST}: it was changed or cut short"
        )
        yield finding(HashMismatchError, entry.filename, what, again)
    elif (found := sha256_of(path)) != entry.sha256:
        what = (
            f"was changed: its sha256 begins with {found[:12]}, with {entry.sha256[:12]} in "
            f"{MANIFEST}"
        )
        yield finding(HashMismatchError, entry.filename, what, again)
    # What others released is as it is; its sha256 is all that there is to say.
    for fault in find_faults(path) if entry.kind is Kind.BUILT else ():
        yield finding(HashMismatchError, entry.filename, fault, again)


def find_leftovers(house: Path) -> Iterator[Finding]:
    """Find what interrupted runs left."""
    for name in (JOURNAL, DAMAGED):
        if os.path.lexists(house / name):
            hint = wheelhouse_command("prune", house)
            yield finding(StorageError, name, "left by an interrupted run", hint)
    if os.path.lexists(house / FILLING):
        hint = f"{wheelhouse_command('fill', house)}; or: {wheelhouse_command('prune', house)}"
        yield finding(
            StorageError,
            FILLING,
            "left by an interrupted fill, or one is at work",
            hint,
        )


def stale_documents(house: Path, listed: Manifest) -> Iterator[Finding]:
    """Find documents that are missing, or not those of the listed wheels."""
    if listed == Manifest() and not (house / MANIFEST).exists():
        return
    for filename, text in write_documents(listed).items():
        path = house / filename
        if not is_file(path) or read_own(path) != text.encode():
            there = "is not the one of these wheels" if is_file(path) else LINKED
            what = there if os.path.lexists(path) else "is missing"
            hint = f"to write it anew: {wheelhouse_command('prune', house)}"
            yield finding(HashMismatchError, filename, what, hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Entries of a wheelhouse and what is wrong with it; ``pins`` are the versions that decide.

    ``unmet`` is what its wheels pin and it does not hold, until it is filled;
    ``offers`` are overrides that known bugs suggest.
    """

    entries: tuple[ManifestEntry, ...]
    pins: Mapping[str, str]
    findings: tuple[Finding, ...]
    unmet: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()
    offers: tuple[Override, ...] = ()


def verify_wheelhouse(house: Path) -> Verified:
    """Find everything that is wrong with a wheelhouse.

    Raises SourceError if there is none, StorageError, BusyError.
    """
    files, listed = check_files(house), load_manifest(house)
    # A damaged wheel has its finding already, and is not opened.
    wheels, unread = read_listed_wheels(
        house, listed.wheels, {finding.where for finding in files}
    )
    found = [*files, *unread]
    for wheel in wheels:
        if wheel.built and wheel.metadata and wheel.metadata.facts:
            found += check_wheel(wheel.metadata, wheel.binaries)
        found += find_unfit(wheel)
    found += disagreements(house, wheels, listed.overrides)
    here = {wheel.name.project for wheel in wheels}
    pinned = [
        f"{name}=={version}"
        for wheel in wheels
        if wheel.metadata
        for name, version in wheel.metadata.decisive_pins.items()
        if name not in here
    ]
    return Verified(
        entries=listed.wheels,
        # Of those that decide: vLLM, torch, NCCL, triton.
        pins={
            wheel.name.project: str(wheel.name.version)
            for wheel in wheels
            if wheel.built
            or wheel.name.project in (TORCH, "triton")
            or is_nccl(wheel.name.project)
        },
        findings=tuple(dict.fromkeys(found)),
        # Of a wheelhouse that was filled, `disagreements` reports what is missing.
        unmet=tuple(dict.fromkeys(pinned))
        if all(wheel.built for wheel in wheels)
        else (),
        overrides=listed.overrides,
        offers=known_overrides(all_pins(wheels), listed.overrides),
    )


def find_unfit(wheel: ListedWheel) -> Iterator[Finding]:
    """Find what is wrong with a built wheel for the device that patchkit.json in it names."""
    facts = wheel.metadata.facts if wheel.metadata else {}
    if not wheel.built or not facts:
        return
    target, filename = wheel.target, wheel.name.filename
    if dict(wheel.entry.facts) != dict(facts):
        what = f"patchkit.json in it does not say what {MANIFEST} says"
        yield finding(
            SourceError, filename, what, "build it again", "one of the two was edited"
        )
    if target is None:
        what = f"patchkit.json in it names no known target: {facts.get('target')!r}"
        yield finding(SourceError, filename, what, "build it again, or update patchkit")
    elif facts.get("project") == "nccl":
        for binary in wheel.binaries:
            try:
                prove_exact(binary, target, cpu=facts.get("machine"))
            except ProofError as error:
                yield finding(
                    ProofError, wheel.name.filename, error.what, error.hint, error.why
                )
    elif facts.get("project") == "vllm":
        version = wheel.name.version
        judged = judge_libraries(wheel.binaries, target, version)
        yield from missed(
            version, [it for it in judged if it.fatal], target, wheel.name.filename
        )
        made, *left = (
            _native_claim(facts, key)
            for key in ("assembled", "compiled_at_first_use", "never_called")
        )
        for binary in wheel.binaries:
            is_left = any(binary.name in names for names in left)
            if binary.name in made and not is_left and jit_entries(binary, target):
                what = f"{binary.name} is not native, though patchkit.json says it is"
                yield finding(ProofError, filename, what, "repack it again")


def _native_claim(facts: Mapping[str, Any], key: str) -> Collection[str]:
    """Return the libraries that patchkit.json names under a key; none if it is not as we write."""
    native = facts.get("native")
    names = native.get(key) if isinstance(native, dict) else None
    return names if isinstance(names, dict) else ()


@dataclass(frozen=True, slots=True)
class Pruned:
    """A file that was removed, or would be, and why."""

    filename: str
    reason: str


def prune_wheelhouse(
    house: Path,
    *,
    drop: Collection[str] = (),
    dry_run: bool = False,
    force: bool = False,
) -> tuple[Pruned, ...]:
    """Remove what the manifest does not list, what an interrupted run left, and what is dropped.

    ``drop`` names wheels by file name, project, or project==version. A wheel that is gone is no
    longer listed, and the three files are written anew. ``force`` sets a journal aside that cannot
    be read. Raises as ``add_wheel`` does, and SourceError if no manifest says what belongs here.
    """
    with open_for_reading(house) if dry_run else hold_wheelhouse(house):
        left = [
            Pruned(finding.where, finding.what) for finding in find_leftovers(house)
        ]
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
        stale = [
            Pruned(finding.where, "written anew")
            for finding in stale_documents(house, kept)
        ]
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
