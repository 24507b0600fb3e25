"""Read the wheels of a wheelhouse: what they say of themselves, what is in them, what they pin."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit.durable.names import is_file
from patchkit.errors import SourceError, UsageError
from patchkit.finding import Finding, finding
from patchkit.source.releases import ExactPin, load_facts
from patchkit.target import Target, targets
from patchkit.wheel.device.inspect import Binary, inspect_wheel
from patchkit.wheel.file.metadata import WheelMetadata, read_metadata
from patchkit.wheel.file.name import ANY, WheelName
from patchkit.wheel.file.wheelfile import WheelFile
from patchkit.wheel.wheelhouse.contents import known_wheels
from patchkit.wheel.wheelhouse.manifest import Kind, ManifestEntry, Override
from patchkit.wheel.wheelhouse.storage import wheelhouse_command

TORCH = "torch"
_LEADING = (TORCH, "vllm")  # the projects whose pins decide what else is built or filled in
# From torch 2.11 on the wheels pin cu13; a wheel for CUDA 12 has the other name.
_NCCL = re.compile(r"nvidia-nccl-cu\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedWheel:
    """A wheel that the manifest lists.

    ``metadata`` is None for what is only locked. ``binaries`` are those of wheels that were built
    here, as nobody else's are judged.
    """

    entry: ManifestEntry
    path: Path
    metadata: WheelMetadata | None = None
    binaries: tuple[Binary, ...] = ()

    @property
    def filename(self) -> str:
        return self.entry.filename

    @property
    def project(self) -> str:
        return self.entry.name.project

    @property
    def built(self) -> bool:
        return self.entry.kind is Kind.BUILT

    @property
    def target(self) -> Target | None:
        """The device that patchkit.json in it names."""
        name = self.metadata.facts.get("target") if self.metadata else None
        return targets().get(name) if isinstance(name, str) else None


def read_listed_wheels(
    house: Path, listed: Sequence[ManifestEntry], spoiled: Collection[str] = ()
) -> tuple[list[ListedWheel], list[Finding]]:
    """Read the wheels, and say why some cannot be read; those that are ``spoiled`` stay closed."""
    wheels, found = [], []
    for entry in listed:
        path = house / entry.filename
        if not is_file(path) or entry.filename in spoiled:
            wheels.append(ListedWheel(entry=entry, path=path))
            continue
        metadata, binaries = None, tuple[Binary, ...]()
        try:
            with WheelFile(path) as wheel:
                metadata = read_metadata(wheel)
                if entry.kind is Kind.BUILT and ANY not in entry.name.cpus and metadata.facts:
                    binaries = inspect_wheel(wheel)
        except SourceError as error:
            what = error.what.removeprefix(f"{path}: ")
            found.append(finding(SourceError, entry.filename, what, error.hint, error.why))
            metadata = None
        wheels.append(ListedWheel(entry=entry, path=path, metadata=metadata, binaries=binaries))
    return wheels, found


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelPin:
    """A pin, who has it (``torch 2.11.0``), and the requirement of a wheel that leads there."""

    pin: ExactPin
    by: str
    wheel: str
    requires: ExactPin


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
        if pinned := load_facts().torch.get(f"{torch.version.major}.{torch.version.minor}"):
            by = f"{TORCH} {torch.version.public}"
            found.append(WheelPin(pin=pinned, by=by, wheel=filename, requires=torch))
    return tuple(found)


def pins_in(house: Path) -> tuple[WheelPin, ...]:
    """Return what the wheels in a folder pin. Raises UsageError if one cannot be read."""
    if not house.is_dir():
        return ()
    names = [name for name in known_wheels(house) if name.project in _LEADING]
    there = [name for name in names if (house / name.filename).is_file()]
    read = []
    for path in (house / name.filename for name in there):
        try:
            with WheelFile(path) as wheel:
                read.append(read_metadata(wheel))
            fault = next(iter(read[-1].faults), "")
        except SourceError as error:
            fault = error.what.removeprefix(str(path)).lstrip(": ")
        if fault:
            raise UsageError(
                f"{path}: its requirements cannot be read: {fault}",
                why="the file is damaged, or no wheel",
                hint="remove it from the wheelhouse, or build it again",
            )
    return wheel_pins(read, set(names) - set(there))


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
