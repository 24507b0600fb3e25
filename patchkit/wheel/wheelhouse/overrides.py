"""Record and remove overrides of a wheelhouse, and choose the NCCL to build for its wheels."""

from dataclasses import replace
from pathlib import Path

from packaging.version import Version

from patchkit.errors import UsageError
from patchkit.patching.recipe import load_recipe
from patchkit.source.project import projects
from patchkit.source.releases import ExactPin, load_facts, named_version
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.wheelhouse.pins import (
    WheelPin,
    WheelPins,
    find_ineffective,
    pins_in,
    require_none,
    sources_of,
)
from patchkit.wheel.wheelhouse.storage import (
    USER,
    Manifest,
    Override,
    Overrides,
    commit_files,
    listed_manifest,
    open_for_writing,
    wheelhouse_command,
    write_documents,
)


def choose_override(house: Path, takes: ExactPin) -> Override:
    """Return the override with which a wheelhouse takes ``takes`` in the place of what it pins.

    The reason is a known bug of the pinned release, if there is one. Raises UsageError if no wheel
    pins the project or several differ, if the version is not later than the pinned one, or for a
    project that others are compiled against, such as torch; SourceError if the recipe refuses this
    NCCL.
    """
    pins = pins_in(house)

    pinned = _find_pin(house, pins, takes.project)
    if library_rules().compiled_against.cover(takes.project):
        raise UsageError(
            f"{takes}: the pin of {takes.project} is not overridden",
            why=f"{pinned.wheel} was compiled against {pinned.pin}",
            hint="take a vLLM that is built for another one",
        )

    version = pinned.pin.version
    if takes.version.local or takes.version <= version:
        raise UsageError(
            f"{takes} is no release later than {version}, which {pinned.by} pins",
            why="what is compiled for a release may call what an older one lacks; the label of a "
            "build is not known before it is built",
            hint=f"name a later release than {version}: a build of it meets the override",
        )

    if project := sources_of(takes.project):
        load_recipe(project).check(takes.version)

    reasons = {override.pin: override.reason for override in known_overrides(pins, ())}
    return Override(
        takes=takes,
        pin=pinned.pin,
        by=pinned.by,
        reason=reasons.get(pinned.pin, "no bug of it is known"),
        word=USER,
    )


def _find_pin(house: Path, pins: WheelPins, project: str) -> WheelPin:
    """Return the pin of a project. Raises UsageError if there is none, or several differ."""
    by_pin = {pin.pin: pin for pin in pins if pin.pin.project == project}
    if not by_pin:
        names = ", ".join(dict.fromkeys(str(pin.pin) for pin in pins))
        first = "repack or build a vLLM into it first"
        raise UsageError(
            f"{house}: nothing here pins {project}",
            why="an override replaces a pin; what nobody pins needs none",
            hint=f"pinned are {names}" if names else first,
        )
    if len(by_pin) > 1:
        different = " and ".join(f"{pin.pin} ({pin.by})" for pin in by_pin.values())
        raise UsageError(
            f"{house}: its wheels pin {different}", hint="drop one of them first"
        )

    (pin,) = by_pin.values()
    return pin


def record_override(house: Path, override: Override) -> bool:
    """Write an override into the manifest, in the place of an earlier one of the project.

    Return False if the manifest has exactly this override already. Raises StorageError, BusyError.
    """
    with open_for_writing(house):
        listed = listed_manifest(house)
        if override in listed.overrides:
            return False
        _replace_override(house, listed, override.takes.project, override)

    return True


def lift_override(house: Path, project: str) -> Override:
    """Remove the override of a project and return it. Raises UsageError if there is none."""
    with open_for_writing(house):
        listed = listed_manifest(house)
        by_project = {override.takes.project: override for override in listed.overrides}
        if project not in by_project:
            raise UsageError(
                f"{house}: there is no override of {project}",
                hint=f"there is {', '.join(by_project) or 'none'}",
            )
        _replace_override(house, listed, project)

    return by_project[project]


def _replace_override(
    house: Path,
    listed: Manifest,
    project: str,
    *new: Override,
) -> None:
    kept = [old for old in listed.overrides if old.takes.project != project]
    after = replace(listed, overrides=(*kept, *new))
    commit_files(house, write_documents(after), ())


def known_overrides(
    pins: WheelPins,
    recorded: Overrides,
) -> Overrides:
    """Return overrides to suggest: of pinned releases that have a known bug.

    A project that has a ``recorded`` override gets no suggestion.
    """
    overridden = {override.takes.project for override in recorded}

    suggestions = {}
    for pin in pins:
        distribution = pin.pin.project
        version = pin.pin.version
        project = sources_of(distribution)
        if not project or distribution in overridden:
            continue

        for bug in load_recipe(project).bugs_of(version):
            if bug.take:
                title = projects()[project].title
                suggestions[distribution] = Override(
                    takes=ExactPin(f"{distribution}=={bug.take}"),
                    pin=pin.pin,
                    by=pin.by,
                    reason=f"{title} {version} {bug.says}",
                    word=f"known bug: {bug.source}",
                )
    return tuple(suggestions.values())


PACKAGE = "nvidia-nccl-cu13"  # the name of the NCCL that is built here


def default_version(house: Path) -> tuple[Version, str]:
    """Return the NCCL to build for the wheels in a wheelhouse, and the reason in words.

    The first of these decides: an override; the pin in a torch wheel; the pin that the recipe
    records for the torch that a vLLM wheel pins; the recipe's default. Raises UsageError if two
    wheels want different versions, if an override has no effect, or if a wheel cannot be read.
    """
    reasons = _required_nccl(house)
    if not reasons:
        reason = "the recipe's default: no torch or vLLM wheel says otherwise"
        return load_facts("nccl").default, reason

    if len(reasons) > 1:
        lines = [f"{house}: its wheels want {len(reasons)} versions of NCCL"]
        lines += [
            f"  {version}: {reason}" for version, reason in sorted(reasons.items())
        ]
        raise UsageError(
            "\n".join(lines), hint="name one with --version, or remove a wheel"
        )

    return next(iter(reasons.items()))


def require_wanted(house: Path, version: Version) -> None:
    """Raise UsageError if the wheels in a wheelhouse want an NCCL, but not this version."""
    reasons = _required_nccl(house)
    if not reasons or Version(version.public) in reasons:
        return

    wanted, reason = max(reasons.items())

    folder = "or build into another folder: --dir"
    hint = f"leave --version out to build {wanted}; {folder}"
    is_pinned = any(pin.pin.project == PACKAGE for pin in pins_in(house))
    if version > wanted and is_pinned:
        override = wheelhouse_command("override", house, f"{PACKAGE}=={version.public}")
        hint = f"to take it, record that: {override}; then build again; {folder}"
    raise UsageError(
        f"{house}: its wheels are for NCCL {wanted}, and {version} is to be built",
        why=f"{reason}; `patchkit verify` refuses another one beside it, and pip replaces it",
        hint=hint,
    )


def _required_nccl(house: Path) -> dict[Version, str]:
    """Return version → reason for the NCCL that an override takes, or else that wheels pin."""
    pins = pins_in(house)
    overrides = listed_manifest(house).overrides

    require_none(find_ineffective(house, overrides, pins))
    for override in overrides:
        if sources_of(override.takes.project):
            return {override.takes.version: str(override)}
    return {
        pin.pin.version: f"{pin.wheel} requires {pin.requires}"
        for pin in pins
        if sources_of(pin.pin.project)
    }


def wanted_release(house: Path, version: str | None) -> Version:
    """Return the FlashInfer to build modules of: ``version``, or the one that wheels here pin.

    Raises UsageError unless exactly one is named.
    """
    pinned = {
        pin.pin.version
        for pin in pins_in(house)
        if pin.pin.project == "flashinfer-python"
    }
    wanted = {named_version(version)} if version else pinned
    if len(wanted | pinned) == 1:
        return wanted.pop()

    releases = " and ".join(map(str, sorted(pinned))) or "no release"
    raise UsageError(
        f"{house}: its wheels pin {releases} of FlashInfer",
        why="modules of another release are ignored, or keep vLLM from starting",
        hint="name a release, for example --version 0.7.2.post1, or another folder: --dir",
    )
