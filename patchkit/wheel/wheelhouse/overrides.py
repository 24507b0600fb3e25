"""Record and lift overrides of a wheelhouse; choose which NCCL to build by them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from packaging.version import Version

from patchkit.errors import UsageError
from patchkit.patching.recipe import load_recipe
from patchkit.source.releases import ExactPin, load_facts
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.wheelhouse.pins import WheelPin, is_nccl, pins_in, require_effect
from patchkit.wheel.wheelhouse.storage import (
    USER,
    Override,
    check_one_line,
    commit_files,
    listed_manifest,
    open_for_writing,
    wheelhouse_command,
    write_documents,
)


def choose_override(house: Path, takes: ExactPin, reason: str = "") -> Override:
    """Return the override that a user asks for.

    Without a reason it is the known bug's of the pinned release, if there is one. Raises UsageError
    if nothing here pins the project, if the version is not later than the pinned one, or for
    torch, which other wheels are compiled against; SourceError for an NCCL that is refused.
    """
    pins = pins_in(house)
    found = {each.pin: each for each in pins if each.pin.project == takes.project}
    if not found:
        names = ", ".join(dict.fromkeys(str(pin.pin) for pin in pins))
        raise UsageError(
            f"{house}: nothing here pins {takes.project}",
            why="an override replaces a pin; what nobody pins needs none",
            hint=f"pinned are {names}"
            if names
            else "repack or build a vLLM into it first",
        )
    if len(found) > 1:
        different = " and ".join(f"{each.pin} ({each.by})" for each in found.values())
        raise UsageError(
            f"{house}: its wheels pin {different}", hint="drop one of them first"
        )
    ((pin, known),) = found.items()
    if library_rules().compiled_against.cover(takes.project):
        raise UsageError(
            f"{takes}: the pin of {takes.project} is not overridden",
            why=f"{known.wheel} was compiled against {pin}",
            hint="take a vLLM that is built for another one",
        )
    if takes.version.local or takes.version <= pin.version:
        raise UsageError(
            f"{takes} is no release later than {pin.version}, which {known.by} pins",
            why="what is compiled for a release may call what an older one lacks; the label of a "
            "build is not known before it is built",
            hint=f"name a later release than {pin.version}: a build of it meets the override",
        )
    if is_nccl(takes.project):
        load_recipe("nccl").check(takes.version)
    try:
        check_one_line(reason or "-")
    except ValueError as error:
        raise UsageError(
            f"--reason {reason!r}: {error}", hint="say it in one line"
        ) from None
    suggested = (each.reason for each in known_overrides(pins, ()) if each.pin == pin)
    return Override(
        takes=takes,
        pin=pin,
        by=known.by,
        reason=reason or next(suggested, "no reason was given"),
        word=USER,
    )


def record_override(house: Path, override: Override) -> bool:
    """Write an override into the manifest, in the place of an earlier one of the project.

    Return False if this very one is there. Raises StorageError, BusyError.
    """
    with open_for_writing(house):
        listed = listed_manifest(house)
        if override in listed.overrides:
            return False
        others = (
            o for o in listed.overrides if o.takes.project != override.takes.project
        )
        commit_files(
            house, write_documents(replace(listed, overrides=(*others, override))), ()
        )
    return True


def lift_override(house: Path, project: str) -> Override:
    """Remove the override of a project and return it. Raises UsageError if there is none."""
    with open_for_writing(house):
        listed = listed_manifest(house)
        for override in listed.overrides:
            if override.takes.project == project:
                left = tuple(each for each in listed.overrides if each != override)
                commit_files(
                    house, write_documents(replace(listed, overrides=left)), ()
                )
                return override
    there = ", ".join(each.takes.project for each in listed.overrides) or "none"
    raise UsageError(
        f"{house}: there is no override of {project}", hint=f"there is {there}"
    )


def known_overrides(
    pins: Iterable[WheelPin], recorded: Iterable[Override]
) -> tuple[Override, ...]:
    """Return the overrides that known bugs of pinned releases suggest, where none is recorded."""
    found, there = {}, {each.takes.project for each in recorded}
    for each in pins:
        project, version = each.pin.project, each.pin.version
        known = is_nccl(project) and project not in there
        for bug in load_recipe("nccl").bugs_of(version) if known else ():
            if bug.take:
                found[project] = Override(
                    takes=ExactPin(f"{project}=={bug.take}"),
                    pin=each.pin,
                    by=each.by,
                    reason=f"NCCL {version} {bug.says}",
                    word=f"known bug: {bug.source}",
                )
    return tuple(found.values())


PACKAGE = "nvidia-nccl-cu13"  # what is built here


def default_version(house: Path) -> tuple[Version, str]:
    """Return the NCCL to build for the wheels in a wheelhouse, and why that one, in words.

    An override decides; else a torch wheel, which pins it itself; else a vLLM wheel, which pins its
    torch, and the recipe says what that pins; without any of them it is the recipe's default.
    Raises UsageError if two wheels want different ones, an override is for other wheels, or a wheel
    cannot be read.
    """
    found = _required_nccl(house)
    if not found:
        return (
            load_facts().default,
            "the recipe's default: no torch or vLLM wheel says otherwise",
        )
    if len(found) > 1:
        raise UsageError(
            f"{house}: its wheels want {len(found)} versions of NCCL\n"
            + "\n".join(
                f"  {version}: {reason}" for version, reason in sorted(found.items())
            ),
            hint="name one with --version, or remove a wheel",
        )
    return next(iter(found.items()))


def require_wanted(house: Path, version: Version) -> None:
    """Raise UsageError if the wheels in a wheelhouse want another NCCL than this one."""
    found = _required_nccl(house)
    if not found or Version(version.public) in found:
        return
    wanted, reason = max(found.items())
    other = "or build into another folder: --dir"
    hint = f"leave --version out to build {wanted}; {other}"
    if version > wanted and any(each.pin.project == PACKAGE for each in pins_in(house)):
        override = wheelhouse_command("override", house, f"{PACKAGE}=={version.public}")
        hint = f"to take it, record that: {override}; then build again; {other}"
    raise UsageError(
        f"{house}: its wheels are for NCCL {wanted}, and {version} is to be built",
        why=f"{reason}; `patchkit verify` refuses another one beside it, and pip replaces it",
        hint=hint,
    )


def _required_nccl(house: Path) -> dict[Version, str]:
    """Return each NCCL that is wanted, and by what."""
    pins, overrides = pins_in(house), listed_manifest(house).overrides
    require_effect(house, overrides, pins)
    for override in overrides:
        if is_nccl(override.takes.project):
            return {override.takes.version: str(override)}
    return {
        each.pin.version: f"{each.wheel} requires {each.requires}"
        for each in pins
        if is_nccl(each.pin.project)
    }
