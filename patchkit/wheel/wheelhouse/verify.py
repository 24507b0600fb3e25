"""Verify a wheelhouse, and remove files from it that do not belong there."""

import os
import shutil
from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path

from patchkit.digests import sha256_of
from patchkit.durable.lock import locked
from patchkit.durable.paths import is_file
from patchkit.errors import (
    HashMismatchError,
    ProofError,
    SourceError,
    StorageError,
    UsageError,
)
from patchkit.finding import Finding, Findings, finding
from patchkit.frozen import Texts, Values, frozen, positional
from patchkit.quoting import quoted
from patchkit.target import Target
from patchkit.wheel.device.inspect import jit_entries, prove_exact
from patchkit.wheel.device.libraries import check_wheel, judge_libraries, missed
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.wheelfile import find_faults, native_claim
from patchkit.wheel.wheelhouse.overrides import known_overrides
from patchkit.wheel.wheelhouse.pins import (
    TORCH,
    ListedWheel,
    ListedWheels,
    all_pins,
    find_disagreements,
    read_listed_wheels,
    sources_of,
)
from patchkit.wheel.wheelhouse.storage import (
    FILLING,
    JOURNAL,
    LINKED,
    MANIFEST,
    WHY_LINKED,
    Kind,
    Manifest,
    ManifestEntry,
    Overrides,
    commit_files,
    hold_wheelhouse,
    known_wheels,
    listed_manifest,
    load_manifest,
    open_for_reading,
    read_own,
    remove_link,
    repack_command,
    wheelhouse_command,
    wheelhouse_journal,
    write_documents,
)


def check_files(house: Path) -> tuple[Finding, ...]:
    """Return findings about the files of a wheelhouse: missing, changed, unlisted or left over.

    The device code of wheels is not judged. Raises as ``load_manifest`` does.
    """
    with open_for_reading(house):
        manifest = listed_manifest(house)
        listed_names = {entry.name for entry in manifest.wheels}

        findings = [*find_leftovers(house)]
        for entry in manifest.wheels:
            findings += _entry_findings(house, entry)
        findings += _find_unlisted(house, listed_names)
        findings += stale_documents(house, manifest)
        return tuple(findings)


def _find_unlisted(house: Path, listed_names: Collection[str]) -> Findings:
    hint = f"move it away; or: {wheelhouse_command('prune', house)}"
    for path in sorted(house.glob("*.whl")):
        if path.name in listed_names:
            continue
        if is_file(path):
            yield finding(UsageError, path.name, f"is not in {MANIFEST}", hint)
        else:
            yield finding(HashMismatchError, path.name, LINKED, hint)


def _entry_findings(house: Path, entry: ManifestEntry) -> Findings:
    path = house / entry.name
    again = _make_again(house, entry)

    if not os.path.lexists(path):
        if entry.held:
            yield finding(
                StorageError,
                entry.name,
                "is listed, and not there",
                f"{again}; or: {wheelhouse_command('prune', house)}",
            )
        return

    if not is_file(path):
        yield finding(
            HashMismatchError,
            entry.name,
            LINKED,
            f"{quoted('rm', '--', path)}; then {again}",
            WHY_LINKED,
        )
        return

    faults = [*_find_change(path, entry)]
    # Of a wheel that others released, only the sha256 is checked: it is used as it is.
    if entry.kind is Kind.BUILT:
        faults += find_faults(path)
    for fault in faults:
        yield finding(HashMismatchError, entry.name, fault, again)


def _make_again(house: Path, entry: ManifestEntry) -> str:
    """Return, for a hint, how to make a wheel again."""
    if entry.kind is not Kind.BUILT:
        return wheelhouse_command("fill", house)
    if entry.facts.get("made") != "repack":
        return "build it again"

    release = f"{entry.name.project}=={entry.name.version.public}"
    machine = str(entry.facts.get("machine"))
    return repack_command(release, machine, "--dir", house)


def _find_change(path: Path, entry: ManifestEntry) -> Iterator[str]:
    size = path.stat().st_size
    # The size is compared first, so that a file that was cut short need not be hashed.
    if entry.held and size != entry.size:
        yield f"has {size} bytes, {entry.size} in {MANIFEST}: it was changed or cut short"
        return

    sha256 = sha256_of(path)
    if sha256 != entry.sha256:
        yield (
            f"was changed: its sha256 begins with {sha256[:12]}, with {entry.sha256[:12]} in "
            f"{MANIFEST}"
        )


def find_leftovers(house: Path) -> Findings:
    """Yield a finding for each file or folder that an interrupted run left."""
    prune = wheelhouse_command("prune", house)
    fill = wheelhouse_command("fill", house)
    either = f"{fill}; or: {prune}"

    for name, problem, hint in (
        (JOURNAL, "left by an interrupted run", prune),
        (FILLING, "left by an interrupted fill, or one is at work", either),
    ):
        if os.path.lexists(house / name):
            yield finding(StorageError, name, problem, hint)


def stale_documents(house: Path, manifest: Manifest) -> Findings:
    """Yield a finding for each document that is missing or does not match the manifest.

    For an empty manifest without a file, yield nothing.
    """
    if manifest == Manifest() and not (house / MANIFEST).exists():
        return

    hint = f"to write it anew: {wheelhouse_command('prune', house)}"
    for filename, text in write_documents(manifest).items():
        path = house / filename
        if not os.path.lexists(path):
            yield finding(HashMismatchError, filename, "is missing", hint)
        elif not is_file(path):
            yield finding(HashMismatchError, filename, LINKED, hint)
        elif read_own(path) != text.encode():
            yield finding(
                HashMismatchError, filename, "is not the one of these wheels", hint
            )


@frozen
class Verified:
    """The result of verifying a wheelhouse.

    ``pins`` maps projects that patchkit built, and torch, triton and NCCL, to their versions.
    ``missing`` are pins of wheels for which it has no wheel yet; empty once it is filled.
    ``offers`` are overrides that known bugs suggest.
    """

    entries: tuple[ManifestEntry, ...]
    pins: Values
    overrides: Overrides
    offers: Overrides
    missing: Texts
    findings: tuple[Finding, ...]


def verify_wheelhouse(house: Path) -> Verified:
    """Return everything that is wrong with a wheelhouse: its files, its wheels, and how they fit.

    Raises as ``load_manifest`` does.
    """
    findings = [*check_files(house)]
    manifest = load_manifest(house)
    # A file that has a finding already may be damaged, and is not opened.
    damaged = {finding.where for finding in findings}
    wheels, unread = read_listed_wheels(house, manifest.wheels, damaged)

    findings += unread
    for wheel in wheels:
        if wheel.metadata and wheel.binaries:
            findings += check_wheel(wheel.metadata, wheel.binaries)
        findings += find_unfit(wheel)
    findings += find_disagreements(house, wheels, manifest.overrides)

    # In a filled wheelhouse, `find_disagreements` reports missing wheels as findings.
    is_filled = any(not wheel.built for wheel in wheels)
    return Verified(
        entries=manifest.wheels,
        pins=_deciding_versions(wheels),
        findings=tuple(dict.fromkeys(findings)),
        missing=() if is_filled else _unmet_pins(wheels),
        overrides=manifest.overrides,
        offers=known_overrides(all_pins(wheels), manifest.overrides),
    )


def _deciding_versions(wheels: ListedWheels) -> Values:
    """Return project → version for built wheels, and for torch, triton and NCCL."""
    versions = {}
    for wheel in wheels:
        project = wheel.name.project
        if wheel.built or project in (TORCH, "triton") or sources_of(project):
            versions[project] = str(wheel.name.version)

    return versions


def _unmet_pins(wheels: ListedWheels) -> Texts:
    projects = {wheel.name.project for wheel in wheels}
    pins = []
    for wheel in wheels:
        if wheel.metadata:
            pins += [
                f"{name}=={version}"
                for name, version in wheel.metadata.decisive_pins.items()
                if name not in projects
            ]

    return tuple(dict.fromkeys(pins))


def find_unfit(wheel: ListedWheel) -> Findings:
    """Yield findings about a built wheel on the device that patchkit.json in the wheel names."""
    facts = wheel.facts
    if not wheel.built or not facts:
        return

    if dict(wheel.entry.facts) != dict(facts):
        yield finding(
            SourceError,
            wheel.name,
            f"patchkit.json in it does not say what {MANIFEST} says",
            "build it again",
            "one of the two was edited",
        )

    if wheel.target is None:
        yield finding(
            SourceError,
            wheel.name,
            f"patchkit.json in it names no known target: {facts.get('target')!r}",
            "build it again, or update patchkit",
        )
        return

    if library_rules().exact.cover(wheel.name.project):
        yield from _find_inexact(wheel, wheel.target)
    judged = judge_libraries(wheel.binaries, wheel.target, wheel.name)
    fatal = [library for library in judged if library.fatal]
    yield from missed(wheel.name, fatal, wheel.target, wheel.name)
    yield from _find_not_native(wheel, wheel.target)


def _find_inexact(wheel: ListedWheel, target: Target) -> Findings:
    filename = wheel.name
    if not wheel.binaries:
        yield finding(ProofError, filename, "holds no library", "build it again")
    for binary in wheel.binaries:
        try:
            prove_exact(binary, target, cpu=wheel.facts.get("machine", target.cpu))
        except ProofError as error:
            yield finding(ProofError, filename, error.what, error.hint, error.why)


def _find_not_native(wheel: ListedWheel, target: Target) -> Findings:
    claimed = set(native_claim(wheel.facts, "assembled"))
    claimed.difference_update(native_claim(wheel.facts, "compiled_at_first_use"))
    # An earlier patchkit named what stayed PTX since the release never calls it.
    claimed.difference_update(native_claim(wheel.facts, "never_called"))
    for binary in wheel.binaries:
        if binary.name in claimed and jit_entries(binary, target):
            yield finding(
                ProofError,
                wheel.name,
                f"{binary.name} is not native, though patchkit.json says it is",
                "repack it again",
            )


@positional
class Pruned:
    """A file that was removed or written anew (in a dry run: would be), and why."""

    filename: str
    reason: str


def prune_wheelhouse(
    house: Path,
    *,
    drop: Collection[str] = (),
    dry_run: bool = False,
) -> tuple[Pruned, ...]:
    """Remove wheels that are dropped or not listed, and files that an interrupted run left.

    ``drop`` names wheels by file name, project, or project==version. A wheel whose file is gone is
    taken off the manifest, and the three documents are written anew. Raises UsageError if ``drop``
    names no wheel, SourceError if there are wheels but no manifest, and as ``hold_wheelhouse``
    does.
    """
    with open_for_reading(house) if dry_run else hold_wheelhouse(house):
        cleared = [
            Pruned(leftover.where, leftover.what) for leftover in find_leftovers(house)
        ]
        if not dry_run:
            _clear_leftovers(house)

        manifest = listed_manifest(house)
        dropped = _find_dropped(house, set(drop))
        removed = [*_plan_removal(house, manifest.wheels, dropped)]
        names = {file.filename for file in removed}
        wheels = [entry for entry in manifest.wheels if entry.name not in names]
        manifest = replace(manifest, wheels=tuple(wheels))

        stale = [
            Pruned(document.where, "written anew")
            for document in stale_documents(house, manifest)
        ]
        if (stale or removed) and not dry_run:
            commit_files(house, write_documents(manifest), sorted(names))

    return (*cleared, *removed, *stale)


def _find_dropped(house: Path, drop: AbstractSet[str]) -> set[str]:
    """Return the file names of the wheels that ``drop`` names.

    Raises UsageError if one of its names is not that of a wheel.
    """
    wheels = known_wheels(house)
    unknown = set(drop)
    dropped: set[str] = set()
    for wheel in wheels:
        names = {wheel, wheel.project, wheel.pinned}
        unknown -= names
        if names & drop:
            dropped.add(wheel)

    if unknown:
        filenames = ", ".join(wheels)
        raise UsageError(
            f"no wheel here is called {min(unknown)!r}",
            hint=f"there are {filenames or 'none'}",
        )
    return dropped


def _plan_removal(
    house: Path,
    entries: Collection[ManifestEntry],
    dropped: AbstractSet[str],
) -> Iterator[Pruned]:
    present = {path.name for path in house.glob("*.whl")}
    if present - dropped and not (house / MANIFEST).exists():
        raise SourceError(
            f"{house / MANIFEST}: is missing, so nothing says which wheels belong here",
            why="it was deleted, or this is not a wheelhouse of patchkit",
            hint="remove the wheels by hand, or build them again",
        )

    listed = {entry.name for entry in entries}
    held = {entry.name for entry in entries if entry.held}
    for names, reason in (
        (dropped, "dropped"),
        (present - listed - dropped, f"not in {MANIFEST}"),
        (held - present - dropped, "gone, listed no more"),
    ):
        for name in sorted(names):
            yield Pruned(name, reason)


def _clear_leftovers(house: Path) -> None:
    """Take an interrupted change back, and remove what an interrupted fill downloaded."""
    wheelhouse_journal(house).recover()

    # A link is removed, not followed: the lock would be taken in the folder where it leads.
    filling = house / FILLING
    remove_link(house, FILLING)
    if filling.exists():
        with locked(filling):
            shutil.rmtree(filling, ignore_errors=True)
