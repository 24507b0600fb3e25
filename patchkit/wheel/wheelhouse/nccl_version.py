"""Choose which NCCL to build: the one that the torch beside it pins, or an override of it."""

from __future__ import annotations

from pathlib import Path

from packaging.version import Version

from patchkit.errors import UsageError
from patchkit.source.releases import load_facts
from patchkit.wheel.wheelhouse.contents import listed_manifest
from patchkit.wheel.wheelhouse.pins import TORCH, is_nccl, pins_in, require_effect
from patchkit.wheel.wheelhouse.storage import command

PACKAGE = "nvidia-nccl-cu13"  # what is built here


def default_version(house: Path | None) -> tuple[Version, str]:
    """Return the NCCL to build for the wheels in a wheelhouse, and why that one, in words.

    An override decides; else a torch wheel, which pins it itself; else a vLLM wheel, which pins its
    torch, and the recipe says what that pins; without any of them it is the recipe's default.
    Raises UsageError if two wheels want different ones, a torch is newer than the recipe, an
    override is for other wheels, or a wheel cannot be read.
    """
    found = _wanted(house)
    if not found:
        _check_torch(house)
        return load_facts().default, "the recipe's default: no torch or vLLM wheel says otherwise"
    if len(found) > 1:
        raise UsageError(
            f"{house}: its wheels want {len(found)} versions of NCCL\n"
            + "\n".join(f"  {version}: {reason}" for version, reason in sorted(found.items())),
            hint="name one with --version, or remove a wheel",
        )
    return next(iter(found.items()))


def require_wanted(house: Path, version: Version) -> None:
    """Raise UsageError if the wheels in a wheelhouse want another NCCL than this one."""
    found = _wanted(house)
    if not found or Version(version.public) in found:
        return
    wanted, reason = max(found.items())
    other = "or build into another folder: --dir"
    hint = f"leave --version out to build {wanted}; {other}"
    if version > wanted and any(each.pin.project == PACKAGE for each in pins_in(house)):
        override = command("override", house, f"{PACKAGE}=={version.public}")
        hint = f"to take it, record that: {override}; then build again; {other}"
    raise UsageError(
        f"{house}: its wheels are for NCCL {wanted}, and {version} is to be built",
        why=f"{reason}; `patchkit verify` refuses another one beside it, and pip replaces it",
        hint=hint,
    )


def _wanted(house: Path | None) -> dict[Version, str]:
    """Return each NCCL that is wanted, and by what."""
    if house is None or not house.is_dir():
        return {}
    pins, overrides = pins_in(house), listed_manifest(house).overrides
    require_effect(house, overrides, pins)
    for override in overrides:
        if is_nccl(override.takes.project):
            return {override.takes.version: str(override)}
    return {each.pin.version: each.reason for each in pins if is_nccl(each.pin.project)}


def _check_torch(house: Path | None) -> None:
    """Raise UsageError for a torch whose NCCL the recipe does not know."""
    facts = load_facts()
    for each in pins_in(house) if house is not None and house.is_dir() else ():
        if each.pin.project == TORCH and not facts.pin_of_torch(str(each.pin.version)):
            raise UsageError(
                f"{each.wheel} requires torch {each.pin.version}, and the recipe does not know its "
                "NCCL",
                why=f"the recipe knows torch {', '.join(facts.torch)}",
                hint="name one with --version: `pip download --no-deps torch` and its METADATA "
                "say which",
            )
