"""Read the wheels of a wheelhouse and their pins, and check that they fit together."""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from patchkit.durable.paths import is_file
from patchkit.errors import ProofError, SourceError, UsageError
from patchkit.finding import Finding, Findings, finding
from patchkit.frozen import Values, frozen
from patchkit.quoting import quoted
from patchkit.source.project import projects
from patchkit.source.releases import ExactPin, load_facts
from patchkit.target import Target, targets
from patchkit.wheel.device.inspect import Binaries, inspect_wheel
from patchkit.wheel.file.torch import torch_of
from patchkit.wheel.file.wheelfile import (
    ANY,
    Facts,
    WheelFile,
    WheelMetadata,
    WheelName,
    read_metadata,
)
from patchkit.wheel.wheelhouse.storage import (
    MANIFEST,
    Kind,
    ManifestEntry,
    Overrides,
    known_wheels,
    wheelhouse_command,
)

TORCH = "torch"


@frozen
class ListedWheel:
    """A wheel that the manifest lists.

    ``metadata`` is None if the wheel was not read, for example if it is only locked. ``binaries``
    are its libraries if patchkit built or judged them; others are not read.
    """

    entry: ManifestEntry
    path: Path
    metadata: WheelMetadata | None = None
    binaries: Binaries = ()

    @property
    def name(self) -> WheelName:
        return self.entry.name

    @property
    def built(self) -> bool:
        return self.entry.kind is Kind.BUILT

    @property
    def target(self) -> Target | None:
        """Return the device that patchkit.json in the wheel names, None if it names none."""
        return targets().get(str(self.facts.get("target")))

    @property
    def facts(self) -> Facts:
        """Return the contents of patchkit.json, {} if the wheel has none or was not read."""
        return self.metadata.facts if self.metadata else {}


ListedWheels = Sequence[ListedWheel]


def read_listed_wheels(
    house: Path,
    listed: Sequence[ManifestEntry],
    spoiled: Collection[str] = (),
) -> tuple[list[ListedWheel], list[Finding]]:
    """Read the listed wheels; return them, and a finding for each wheel that cannot be read.

    Files named in ``spoiled`` are not opened.
    """
    wheels = []
    findings = []
    for entry in listed:
        path = house / entry.name
        wheel = ListedWheel(entry=entry, path=path)
        if is_file(path) and entry.name not in spoiled:
            try:
                wheel = _read_wheel(entry, path)
            except SourceError as error:
                what = error.what.removeprefix(f"{path}: ")
                findings.append(
                    finding(SourceError, entry.name, what, error.hint, error.why)
                )
        wheels.append(wheel)

    return wheels, findings


def _read_wheel(entry: ManifestEntry, path: Path) -> ListedWheel:
    with WheelFile(path) as file:
        metadata = read_metadata(file)

        facts = metadata.facts
        # Of some projects, patchkit takes upstream's libraries as they are, and judges none.
        is_judged = facts.get("libraries") != {} or "native" in facts
        is_ours = entry.kind is Kind.BUILT and bool(facts)
        return ListedWheel(
            entry=entry,
            path=path,
            metadata=metadata,
            binaries=inspect_wheel(file) if is_ours and is_judged else (),
        )


@frozen
class WheelPin:
    """A pin and its origin: ``by`` is the release that has the pin (``torch 2.11.0``).

    ``wheel`` is the file name of the wheel in the wheelhouse that leads to the pin, and
    ``requires`` its requirement that does so: the pin itself, or a torch that has the pin.
    """

    pin: ExactPin
    by: str
    wheel: str
    requires: ExactPin


WheelPins = Sequence[WheelPin]


def leading() -> set[str]:
    """Return the distributions whose pins decide which other wheels are built or downloaded."""
    return {TORCH, *(project.distribution for project in projects().values())}


@cache
def sources_of(distribution: str) -> str:
    """Return the project whose sources make what torch pins by this name, "" for none."""
    for project in projects():
        pins = load_facts(project).torch.values()
        if distribution in {pin.project for pin in pins}:
            return project

    return ""


def wheel_pins(
    wheels: Iterable[WheelMetadata],
    locked: Iterable[WheelName],
) -> WheelPins:
    """Return the pins of the wheels of torch, and of projects.

    If no torch is among ``wheels``, add the pin of NCCL that the recipe records for the torch that
    a wheel requires, or else for a torch that is only ``locked``.
    """
    deciding = [wheel for wheel in wheels if wheel.name.project in leading()]
    pins = [pin for wheel in deciding for pin in _own_pins(wheel)]
    if any(wheel.name.project == TORCH for wheel in deciding):
        return tuple(pins)

    torches = {pin.wheel: pin.pin for pin in pins if pin.pin.project == TORCH}
    if not torches:
        torches = {
            name: ExactPin(name.pinned) for name in locked if name.project == TORCH
        }
    return (*pins, *_recorded_pins(torches))


def _recorded_pins(torches: Mapping[str, ExactPin]) -> Iterator[WheelPin]:
    """Yield what each torch pins according to the recipes; ``torches`` is wheel → torch."""
    for (filename, torch), project in product(torches.items(), projects()):
        version = torch.version
        pin = load_facts(project).torch.get(f"{version.major}.{version.minor}")
        if pin:
            by = f"{TORCH} {version.public}"
            yield WheelPin(pin=pin, by=by, wheel=filename, requires=torch)


def _own_pins(wheel: WheelMetadata) -> Iterator[WheelPin]:
    by = f"{wheel.name.project} {wheel.name.version.public}"
    for project, version in wheel.pins.items():
        with contextlib.suppress(
            ValueError
        ):  # === also takes texts that are no version
            pin = ExactPin(f"{project}=={version}")
            yield WheelPin(pin=pin, by=by, wheel=wheel.name, requires=pin)


def pins_in(house: Path) -> WheelPins:
    """Return the pins of the wheels of vLLM and torch in a wheelhouse; () if it does not exist.

    Raises UsageError if a wheel cannot be read.
    """
    if not house.is_dir():
        return ()
    wheels = []
    absent = []
    for name in known_wheels(house):
        path = house / name
        if name.project not in leading():
            continue
        if path.is_file():
            wheels.append(_read_requirements(path))
        else:
            absent.append(name)

    return wheel_pins(wheels, absent)


def _read_requirements(path: Path) -> WheelMetadata:
    """Read a wheel's metadata. Raises UsageError if it is damaged or malformed."""
    try:
        with WheelFile(path) as wheel:
            metadata = read_metadata(wheel)
        fault = next(iter(metadata.faults), "")
    except SourceError as error:
        fault = error.what.removeprefix(str(path)).lstrip(": ")

    if fault:
        raise UsageError(
            f"{path}: its requirements cannot be read: {fault}",
            why="the file is damaged, or no wheel",
            hint="remove it from the wheelhouse, or build it again",
        )
    return metadata


def find_ineffective(
    house: Path,
    overrides: Overrides,
    pins: WheelPins,
) -> Findings:
    """Yield a finding for each override whose pin no wheel has."""
    for override in overrides:
        project = override.pin.project
        present = [pin for pin in pins if pin.pin.project == project]
        if any(pin.pin == override.pin for pin in present):
            continue

        now = ", ".join(f"{pin.by} pins {pin.pin.version}" for pin in present)
        now = now or f"nothing here pins {project}"
        yield finding(
            UsageError,
            MANIFEST,
            f"its override of {override.pin} has no effect: {now}",
            wheelhouse_command("override", house, "--remove", project),
            "it was recorded for other wheels",
        )


def require_none(findings: Iterable[Finding]) -> None:
    """Raise UsageError for the first of some findings."""
    for wrong in findings:
        raise UsageError(f"{wrong.where}: {wrong.what}", why=wrong.why, hint=wrong.hint)


@frozen
class _NodeWheels:
    """The wheels that a node with a CPU can install, and the overrides of their pins."""

    cpu: str
    wheels: ListedWheels
    overrides: Overrides

    def unmet_needs(self) -> Findings:
        """Yield a finding for each requirement that the other wheels do not meet.

        A requirement of a project without a wheel only counts if the wheelhouse was filled.
        """
        by_project = {wheel.name.project: wheel for wheel in self.wheels}
        # Before a fill there are only built wheels, and an index provides their dependencies.
        is_complete = any(not wheel.built for wheel in self.wheels)

        for wheel in self.wheels:
            for requirement in self._requirements(wheel):
                # The marker is left out, since it is met.
                need = f"needs {str(requirement).partition(';')[0].strip()}"
                specifier = requirement.specifier
                neighbour = by_project.get(canonicalize_name(requirement.name))
                if neighbour is None:
                    if is_complete:
                        yield finding(
                            UsageError,
                            wheel.name,
                            f"{need}, which is not in the lock",
                            wheelhouse_command("fill", wheel.path.parent),
                            "it was built after a fill",
                        )
                elif not self._is_met(specifier, neighbour):
                    yield finding(
                        UsageError,
                        wheel.name,
                        f"{need}; here is {neighbour.name.pinned}",
                        _mend_command(neighbour, str(specifier).removeprefix("==")),
                        "pip finds no set that fits together (ResolutionImpossible)",
                    )

    def _requirements(self, wheel: ListedWheel) -> Iterator[Requirement]:
        """Yield the requirements of a wheel whose markers hold on the node.

        Markers may ask for the version of Python: it is that of the nodes that the wheelhouse was
        filled for, or of the Python that runs patchkit if it was not filled yet.
        """
        environment = self._marker_environment()
        for requirement in wheel.metadata.requires if wheel.metadata else ():
            if requirement.marker is None or requirement.marker.evaluate(environment):
                yield requirement

    def _marker_environment(self) -> Values:
        # With "", requirements of extras do not count.
        environment = {"platform_machine": self.cpu, "extra": ""}
        for wheel in self.wheels:
            python = "" if wheel.built else wheel.entry.facts.get("python")
            if python:
                parts = str(python).split(".")
                environment["python_version"] = ".".join(parts[:2])
                environment["python_full_version"] = ".".join([*parts, "0"][:3])
                break

        return environment

    def _is_met(self, specifier: SpecifierSet, wheel: ListedWheel) -> bool:
        """Return whether a wheel meets a specifier, or an override replaces exactly this pin."""
        if specifier.contains(wheel.name.version, prereleases=True):
            return True
        return any(
            wheel.name.project == override.takes.project
            and specifier == SpecifierSet(f"=={override.pin.version}")
            for override in self.overrides
        )

    def other_releases(self) -> Findings:
        """Yield findings for wheels of another release than a pin that is not their requirement.

        That is the NCCL that torch pins according to the recipe, unless the METADATA of a torch
        wheel was read, which ``unmet_needs`` uses; and the FlashInfer of compiled modules.
        """
        for pin, wheel in product(all_pins(self.wheels), self.wheels):
            version = pin.pin.version
            if self._is_met(SpecifierSet(f"=={version}"), wheel):
                continue

            is_recorded = pin.pin != pin.requires
            is_module = wheel.name.project.startswith("flashinfer-jit-cache")
            if is_recorded and sources_of(wheel.name.project):
                yield finding(
                    UsageError,
                    pin.wheel,
                    f"is for {pin.by}, which pins NCCL {version}; here is {wheel.name.pinned}",
                    _mend_command(wheel, version),
                    "beside that torch pip replaces it by stock's, or installs nothing",
                )
            elif is_module and pin.pin.project == "flashinfer-python":
                release = wheel.name.version.public
                yield finding(
                    UsageError,
                    wheel.name,
                    f"is for FlashInfer {release}; {pin.by} pins {version}",
                    _mend_command(wheel, version),
                    "FlashInfer ignores modules of another release, or does not start",
                )

    def cuda_clash(self) -> Findings:
        """Yield a finding if the wheels need several CUDA versions, or if torch has no CUDA."""
        majors = cuda_majors(self.wheels)
        for wheel in self.wheels:
            if wheel.name.project != TORCH or wheel.metadata is None:
                continue
            requires = map(str, self._requirements(wheel))
            torch = torch_of(wheel.name.version, requires, wheel.metadata.members)
            if torch.cuda:
                majors[torch.cuda] = wheel.name
            elif torch.cuda is None:
                yield finding(
                    ProofError,
                    wheel.name,
                    f"is a torch for CPUs alone: {torch.seen}",
                    wheelhouse_command("fill", wheel.path.parent),
                )

        if len(majors) > 1:
            parts = [f"CUDA {major}: {name}" for major, name in sorted(majors.items())]
            yield finding(
                ProofError,
                majors[max(majors)],
                f"is for another CUDA than what lies beside it: {'; '.join(parts)}",
                "take all of it for one CUDA",
                "a process loads both runtimes, and kernels of one do not see tensors of the other",
            )

    def device_clash(self) -> Findings:
        devices = {
            wheel.target.name: wheel.name for wheel in self.wheels if wheel.target
        }
        if len(devices) < 2:
            return

        parts = [f"{name}: {filename}" for name, filename in sorted(devices.items())]
        yield finding(
            UsageError,
            list(devices.values())[-1],
            f"wheels for {self.cpu} are made for several devices: {'; '.join(parts)}",
            "a wheelhouse for each device: --dir",
            "on either some of it does not load",
        )


def find_disagreements(
    house: Path,
    wheels: ListedWheels,
    overrides: Overrides,
) -> tuple[Finding, ...]:
    """Return findings, each only once, about everything that keeps wheels from working together."""
    findings = [*find_ineffective(house, overrides, all_pins(wheels))]
    findings += find_contradicted(overrides, wheels)

    for cpu in sorted({cpu for wheel in wheels for cpu in wheel.name.cpus} - {ANY}):
        group = [wheel for wheel in wheels if wheel.name.cpus & {cpu, ANY}]
        node = _NodeWheels(cpu=cpu, wheels=group, overrides=overrides)
        findings += node.unmet_needs()
        findings += node.other_releases()
        findings += node.cuda_clash()
        findings += node.device_clash()

    # A wheel for any CPU is in every group, so its findings may be there several times.
    return tuple(dict.fromkeys(findings))


def find_contradicted(
    overrides: Overrides,
    wheels: ListedWheels,
) -> Findings:
    """Yield a finding for each wheel whose version is not the one that an override takes."""
    for override, wheel in product(overrides, wheels):
        pin = override.takes
        version = wheel.name.version
        if wheel.name.project != pin.project:
            continue
        # Compared without the label, such as +gb10.0a1b2c, that a wheel of patchkit has.
        if Version(version.public) != pin.version:
            yield finding(
                UsageError,
                wheel.name,
                f"is {version}, and the override takes {pin}",
                _mend_command(wheel, pin.version),
                "the override was recorded after it was put here",
            )


def all_pins(wheels: ListedWheels) -> WheelPins:
    """Return the pins of listed wheels, also for a torch that is only locked."""
    read = [wheel.metadata for wheel in wheels if wheel.metadata]
    return wheel_pins(read, [wheel.name for wheel in wheels if not wheel.metadata])


def _mend_command(wheel: ListedWheel, version: object) -> str:
    """Return the commands that replace a wheel by ``version``, for a hint.

    A dependency is resolved anew, and a wheel that patchkit built is built again. For an NCCL that
    is later than ``version``, the hint also has the command that keeps it.
    """
    house = wheel.path.parent
    if not wheel.built:
        return wheelhouse_command("fill", house)

    project = wheel.name.project
    drop = wheelhouse_command("prune", house, "--drop", project)
    words = ["build", sources_of(project) or project, "--version", str(version)]
    if wheel.entry.facts.get("made") == "repack":
        words = ["repack", f"{project}=={version}"]
    build = quoted("patchkit", *words, "--dir", house)

    present = wheel.name.version.public
    if not sources_of(project) or str(version) not in SpecifierSet(f"<{present}"):
        return f"{drop} && {build}"

    keep = wheelhouse_command("override", house, f"{project}=={present}")
    return f"{drop} && {build}; or, to keep it: {keep}"


def cuda_majors(wheels: ListedWheels) -> dict[int, str]:
    """Return major version of CUDA → a wheel, for each version that built libraries need."""
    return {
        major: wheel.name
        for wheel in wheels
        for binary in wheel.binaries
        for major in binary.cuda
    }
