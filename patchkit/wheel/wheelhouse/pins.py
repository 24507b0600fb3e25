"""Find what the wheels of a wheelhouse pin."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import SourceError, UsageError
from patchkit.source.releases import load_facts
from patchkit.versions import ExactPin
from patchkit.wheel.file.metadata import WheelMetadata, read_metadata
from patchkit.wheel.file.name import WheelName
from patchkit.wheel.file.wheelfile import WheelFile
from patchkit.wheel.wheelhouse.contents import known_wheels
from patchkit.wheel.wheelhouse.manifest import Override
from patchkit.wheel.wheelhouse.storage import wheelhouse_command

TORCH = "torch"
_LEADING = (TORCH, "vllm")  # the projects whose pins decide what else is built or filled in
# From torch 2.11 on the wheels pin cu13; a wheel for CUDA 12 has the other name.
_NCCL = re.compile(r"nvidia-nccl-cu\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelPin:
    """A pin, who has it (``torch 2.11.0``), and the requirement of a wheel that leads there."""

    pin: ExactPin
    by: str
    wheel: str
    requires: ExactPin

    @property
    def reason(self) -> str:
        return f"{self.wheel} requires {self.requires}"


def is_nccl(project: str) -> bool:
    """Check whether a project is NCCL's, for whichever CUDA."""
    return _NCCL.fullmatch(project) is not None


def wheel_pins(
    wheels: Iterable[WheelMetadata], locked: Iterable[WheelName] = ()
) -> tuple[WheelPin, ...]:
    """Return what vLLM's and torch's wheels pin.

    Where torch's own METADATA is not at hand, the recipe says what it pins: the torch that a wheel
    requires, or the one that is only ``locked``.
    """
    leading = [wheel for wheel in wheels if wheel.name.project in _LEADING]
    found = []
    for wheel in leading:
        by = f"{wheel.name.project} {wheel.name.version.public}"
        for project, version in wheel.pins.items():
            with contextlib.suppress(ValueError):  # === takes what is no version
                pin = ExactPin(f"{project}=={version}")
                found.append(WheelPin(pin=pin, by=by, wheel=wheel.name.filename, requires=pin))
    if any(wheel.name.project == TORCH for wheel in leading):
        return tuple(found)
    torches = {each.wheel: each.pin for each in found if each.pin.project == TORCH}
    if not torches:
        torches = {each.filename: ExactPin(each.pinned) for each in locked if each.project == TORCH}
    for filename, torch in torches.items():
        if pinned := load_facts().pin_of_torch(str(torch.version)):
            by = f"{TORCH} {torch.version.public}"
            found.append(WheelPin(pin=pinned, by=by, wheel=filename, requires=torch))
    return tuple(found)


def pins_in(house: Path) -> tuple[WheelPin, ...]:
    """Return what the wheels in a folder pin. Raises UsageError if one cannot be read."""
    if not house.is_dir():
        return ()
    names = [name for name in known_wheels(house) if name.project in _LEADING]
    there = [name for name in names if (house / name.filename).is_file()]
    return wheel_pins(
        [_read_requirements(house / name.filename) for name in there], set(names) - set(there)
    )


def without_effect(
    overrides: Iterable[Override], pins: Sequence[WheelPin]
) -> tuple[tuple[Override, str], ...]:
    """Return the overrides whose pin no wheel has any more, and what is pinned now."""
    found = []
    for override in overrides:
        now = [each for each in pins if each.pin.project == override.pin.project]
        if override.pin not in (each.pin for each in now):
            said = ", ".join(f"{each.by} pins {each.pin.version}" for each in now)
            found.append((override, said or f"nothing here pins {override.pin.project}"))
    return tuple(found)


def require_effect(house: Path, overrides: Iterable[Override], pins: Sequence[WheelPin]) -> None:
    """Raise UsageError for an override that was recorded for other wheels."""
    for override, now in without_effect(overrides, pins):
        raise UsageError(
            f"{house}: its override of {override.pin} has no effect: {now}",
            why="it was recorded for other wheels",
            hint=wheelhouse_command("override", house, "--remove", override.takes.project),
        )


def _read_requirements(path: Path) -> WheelMetadata:
    try:
        with WheelFile(path) as wheel:
            metadata = read_metadata(wheel)
        fault = metadata.faults[0] if metadata.faults else ""
    except SourceError as error:
        fault = error.what.removeprefix(str(path)).lstrip(": ")
    if fault:
        raise UsageError(
            f"{path}: its requirements cannot be read: {fault}",
            why="the file is damaged, or no wheel",
            hint="remove it from the wheelhouse, or build it again",
        )
    return metadata
