"""Read the wheels of a wheelhouse, what they pin, and whether they fit together."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from patchkit.durable.paths import is_file
from patchkit.errors import ProofError, SourceError, UsageError
from patchkit.finding import Finding, finding
from patchkit.quoting import quoted
from patchkit.source.releases import ExactPin, load_facts
from patchkit.target import Target, targets
from patchkit.wheel.device.inspect import Binary, inspect_wheel
from patchkit.wheel.file.metadata import WheelMetadata, read_metadata
from patchkit.wheel.file.torch import torch_of
from patchkit.wheel.file.wheelfile import ANY, WheelFile, WheelName
from patchkit.wheel.wheelhouse.contents import known_wheels
from patchkit.wheel.wheelhouse.storage import (
    MANIFEST,
    Kind,
    ManifestEntry,
    Override,
    wheelhouse_command,
)

TORCH = "torch"
_LEADING = (
    TORCH,
    "vllm",
)  # the projects whose pins decide what else is built or filled in
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
    def name(self) -> WheelName:
        return self.entry.name

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
        metadata, binaries = None, tuple[Binary, ...]()
        if is_file(path) and entry.filename not in spoiled:
            try:
                with WheelFile(path) as wheel:
                    metadata = read_metadata(wheel)
                    if (
                        entry.kind is Kind.BUILT
                        and ANY not in entry.name.cpus
                        and metadata.facts
                    ):
                        binaries = inspect_wheel(wheel)
            except SourceError as error:
                what = error.what.removeprefix(f"{path}: ")
                found.append(
                    finding(SourceError, entry.filename, what, error.hint, error.why)
                )
                metadata = None
        wheels.append(
            ListedWheel(entry=entry, path=path, metadata=metadata, binaries=binaries)
        )
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
                found.append(
                    WheelPin(pin=pin, by=by, wheel=wheel.name.filename, requires=pin)
                )
    if any(wheel.name.project == TORCH for wheel in leading):
        return tuple(found)
    torches = {each.wheel: each.pin for each in found if each.pin.project == TORCH}
    if not torches:
        torches = {
            each.filename: ExactPin(each.pinned)
            for each in locked
            if each.project == TORCH
        }
    for filename, torch in torches.items():
        if pinned := load_facts().torch.get(
            f"{torch.version.major}.{torch.version.minor}"
        ):
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
            found.append(
                (override, said or f"nothing here pins {override.pin.project}")
            )
    return tuple(found)


def require_effect(
    house: Path, overrides: Iterable[Override], pins: Sequence[WheelPin]
) -> None:
    """Raise UsageError for an override that was recorded for other wheels."""
    for override, now in without_effect(overrides, pins):
        raise UsageError(
            f"{house}: its override of {override.pin} has no effect: {now}",
            why="it was recorded for other wheels",
            hint=wheelhouse_command(
                "override", house, "--remove", override.takes.project
            ),
        )


def find_disagreements(
    house: Path, wheels: Sequence[ListedWheel], overrides: Sequence[Override]
) -> tuple[Finding, ...]:
    """Find everything that keeps these wheels from working together on a node, each thing once."""
    found = []
    for override, now in without_effect(overrides, all_pins(wheels)):
        what = f"has an override of {override.pin}: {now}"
        hint = wheelhouse_command("override", house, "--remove", override.takes.project)
        why = "an override holds for the pin that it was made for, and no other"
        found.append(finding(UsageError, MANIFEST, what, hint, why))
    found += find_contradicted(overrides, wheels)
    for cpu in sorted({cpu for wheel in wheels for cpu in wheel.name.cpus} - {ANY}):
        # What a node with this CPU can install.
        group = [wheel for wheel in wheels if wheel.name.cpus & {cpu, ANY}]
        found += _find_unmet_needs(cpu, group, overrides)
        # An NCCL that is not the one torch pins, where torch's own METADATA is not at hand.
        nccl = next((wheel for wheel in group if is_nccl(wheel.name.project)), None)
        if any(wheel.name.project == TORCH and wheel.metadata for wheel in group):
            nccl = None
        for each in all_pins(group) if nccl else ():
            pin, pinned = each.pin, SpecifierSet(f"=={each.pin.version}")
            if nccl and is_nccl(pin.project) and not _is_met(pinned, nccl, overrides):
                here = nccl.name.pinned
                what = (
                    f"is for {each.by}, which pins NCCL {pin.version}; here is {here}"
                )
                why = (
                    "beside that torch pip replaces it by stock's, or installs nothing"
                )
                hint = _mend_command(nccl, pin.version)
                found.append(finding(UsageError, each.wheel, what, hint, why))
        found += _find_cuda_clash(cpu, group)
        devices = {
            wheel.target.name: wheel.name.filename for wheel in group if wheel.target
        }
        if len(devices) > 1:
            parts = "; ".join(
                f"{name}: {filename}" for name, filename in sorted(devices.items())
            )
            what = f"wheels for {cpu} are made for several devices: {parts}"
            hint, why = (
                "a wheelhouse for each device: --dir",
                "on either some of it does not load",
            )
            found.append(finding(UsageError, [*devices.values()][-1], what, hint, why))
    # A wheel for any CPU is in every group, and would be reported once for each.
    return tuple(dict.fromkeys(found))


def find_contradicted(
    overrides: Sequence[Override], wheels: Sequence[ListedWheel]
) -> Iterator[Finding]:
    """Find the wheels of another version than an override takes."""
    for override, wheel in product(overrides, wheels):
        version, taken = wheel.name.version, override.takes
        # A build of what is taken has a label.
        if (
            wheel.name.project == taken.project
            and Version(version.public) != taken.version
        ):
            what = f"is {version}, and the override takes {taken}"
            hint = _mend_command(wheel, taken.version)
            why = "the override was recorded after it was put here"
            yield finding(UsageError, wheel.name.filename, what, hint, why)


def all_pins(wheels: Sequence[ListedWheel]) -> tuple[WheelPin, ...]:
    """Return what the wheels that were read, and those that are only locked, pin."""
    read = [wheel.metadata for wheel in wheels if wheel.metadata]
    return wheel_pins(read, [wheel.name for wheel in wheels if not wheel.metadata])


def _is_met(
    specifier: SpecifierSet, wheel: ListedWheel, overrides: Sequence[Override]
) -> bool:
    """Check whether a wheel is what a pin asks for, or an override of this very pin decides."""
    return specifier.contains(wheel.name.version, prereleases=True) or any(
        wheel.name.project == override.takes.project
        and specifier == SpecifierSet(f"=={override.pin.version}")
        for override in overrides
    )


def _find_unmet_needs(
    cpu: str, wheels: Sequence[ListedWheel], overrides: Sequence[Override]
) -> Iterator[Finding]:
    """Find requirements that a wheel beside it does not meet or, in a complete lock, none meets."""
    here = {wheel.name.project: wheel for wheel in wheels}
    # Without a fill nothing but the built wheels is there, and needs are met from an index.
    complete = any(not wheel.built for wheel in wheels)
    for wheel in wheels:
        for requirement in _applicable_requirements(wheel.metadata, cpu, wheels):
            other, specifier = (
                here.get(canonicalize_name(requirement.name)),
                requirement.specifier,
            )
            what = f"needs {str(requirement).partition(';')[0].strip()}"  # its marker is met
            if other is None and complete:
                what += ", which is not in the lock"
                hint, why = (
                    wheelhouse_command("fill", wheel.path.parent),
                    "it was built after a fill",
                )
            elif other is None or _is_met(specifier, other, overrides):
                continue
            else:
                what += f"; here is {other.name.pinned}"
                hint = _mend_command(other, str(specifier).removeprefix("=="))
                why = "pip finds no set that fits together (ResolutionImpossible)"
            yield finding(UsageError, wheel.name.filename, what, hint, why)


def _mend_command(wheel: ListedWheel, version: object) -> str:
    """Return the commands that put another version in its place, or keep a later one.

    A dependency is resolved anew; a wheel that was built here is built again.
    """
    house, there = wheel.path.parent, wheel.name.version.public
    if not wheel.built:
        return wheelhouse_command("fill", house)
    name = "nccl" if is_nccl(wheel.name.project) else wheel.name.project
    drop = wheelhouse_command("prune", house, "--drop", wheel.name.project)
    build = quoted("patchkit", "build", name, "--version", str(version), "--dir", house)
    keep = wheelhouse_command("override", house, f"{wheel.name.project}=={there}")
    later = is_nccl(wheel.name.project) and SpecifierSet(f"<{there}").contains(
        str(version)
    )
    return f"{drop} && {build}" + (f"; or, to keep it: {keep}" if later else "")


def _applicable_requirements(
    metadata: WheelMetadata | None, cpu: str, wheels: Sequence[ListedWheel]
) -> Iterator[Requirement]:
    """Yield the requirements that hold on this CPU, with the Python of the lock if there is one."""
    # An empty extra: what only an extra requires is not needed here.
    said = {**default_environment(), "platform_machine": cpu, "extra": ""}
    locked = (wheel.entry.facts.get("python") for wheel in wheels if not wheel.built)
    if python := next((str(python) for python in locked if python), ""):
        said["python_version"] = ".".join(python.split(".")[:2])
        said["python_full_version"] = ".".join((*python.split("."), "0")[:3])
    environment = {key: str(value) for key, value in said.items()}
    for requirement in metadata.requires if metadata else ():
        if requirement.marker is None or requirement.marker.evaluate(environment):
            yield requirement


def _find_cuda_clash(cpu: str, wheels: Sequence[ListedWheel]) -> Iterator[Finding]:
    """Find a second CUDA, or a torch that has none."""
    majors = {
        m: wheel.name.filename
        for wheel in wheels
        for it in wheel.binaries
        for m in it.cuda
    }
    for wheel in wheels:
        if wheel.name.project == TORCH and wheel.metadata:
            requires = map(str, _applicable_requirements(wheel.metadata, cpu, wheels))
            torch = torch_of(wheel.name.version, requires, wheel.metadata.members)
            if torch.cuda is None:
                what = f"is a torch for CPUs alone: {torch.seen}"
                again = wheelhouse_command("fill", wheel.path.parent)
                yield finding(ProofError, wheel.name.filename, what, again)
            elif torch.cuda:
                majors[torch.cuda] = wheel.name.filename
    if len(majors) > 1:
        parts = "; ".join(
            f"CUDA {major}: {name}" for major, name in sorted(majors.items())
        )
        last = majors[max(majors)]
        what = f"is for another CUDA than what lies beside it: {parts}"
        why = "a process loads both runtimes, and kernels of one do not see tensors of the other"
        yield finding(ProofError, last, what, "take all of it for one CUDA", why)
