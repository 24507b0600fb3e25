"""Check that the wheels of a wheelhouse fit together: pins, Pythons, systems, devices, CUDA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from patchkit.elf import by_version
from patchkit.errors import ProofError, UsageError
from patchkit.finding import Finding, finding
from patchkit.quoting import quoted
from patchkit.source.releases import load_facts
from patchkit.wheel.file.metadata import WheelMetadata
from patchkit.wheel.file.name import ANY
from patchkit.wheel.file.torch import torch_of
from patchkit.wheel.wheelhouse.listed_wheel import ListedWheel, by_cpu
from patchkit.wheel.wheelhouse.name_checks import promised_glibc, supported
from patchkit.wheel.wheelhouse.storage import command
from patchkit.wheel.wheelhouse.wheel_checks import cuda_majors

_NCCL = "nvidia-nccl-cu"


def disagreements(wheels: Sequence[ListedWheel]) -> tuple[Finding, ...]:
    """Find everything that keeps these wheels from working together on a node, each thing once."""
    found: list[Finding] = []
    for cpu, group in by_cpu(wheels):
        for check in (_needs, _nccl, _torch_and_cuda, _devices, _pythons, _systems):
            found += check(cpu, group)
    # A wheel for any CPU is in every group, and would be reported once for each.
    return tuple(dict.fromkeys([*found, *_uneven(wheels)]))


def _needs(cpu: str, wheels: Sequence[ListedWheel]) -> Iterator[Finding]:
    """Find requirements that a wheel beside it does not meet or, in a complete lock, none meets."""
    here = {wheel.project: wheel for wheel in wheels}
    # Without a fill nothing but the built wheels is there, and needs are met from an index.
    complete = any(not wheel.built for wheel in wheels)
    for wheel in wheels:
        for requirement in _applicable(wheel.metadata, cpu, wheels):
            other, specifier = here.get(canonicalize_name(requirement.name)), requirement.specifier
            needed = str(requirement).partition(";")[0].strip()  # its marker is met
            if other is None and complete:
                what = f"needs {needed}, which is not in the lock"
                hint, why = _fill(wheel), "it was built after a fill"
                yield finding(UsageError, wheel.filename, what, hint, why)
            elif other and not specifier.contains(other.entry.name.version, prereleases=True):
                yield finding(
                    UsageError,
                    wheel.filename,
                    f"needs {needed}; here is {other.entry.name.pinned}",
                    _instead(other, str(specifier).removeprefix("=="))
                    if other.built
                    else _fill(other),
                    "pip finds no set that fits together (ResolutionImpossible)",
                )


def _fill(wheel: ListedWheel, *options: str) -> str:
    """Return the command that resolves the dependencies anew."""
    return command("fill", wheel.path.parent, *options)


def _instead(wheel: ListedWheel, version: object) -> str:
    """Return the commands that replace a wheel that was built here by another version."""
    house = wheel.path.parent
    name = "nccl" if wheel.project.startswith(_NCCL) else wheel.project
    drop = command("prune", house, "--drop", wheel.project)
    build = quoted("patchkit", "build", name, "--version", str(version), "--dir", house)
    return f"{drop} && {build}"


def _applicable(
    metadata: WheelMetadata | None, cpu: str, wheels: Sequence[ListedWheel]
) -> Iterator[Requirement]:
    """Yield the requirements that hold on this CPU, with the Python of the lock if there is one."""
    # An empty extra: what only an extra requires is not needed here.
    said = {**default_environment(), "platform_machine": cpu, "extra": ""}
    if python := _locked_python(wheels):
        said["python_version"] = ".".join(python.split(".")[:2])
        said["python_full_version"] = ".".join((*python.split("."), "0")[:3])
    environment = {key: str(value) for key, value in said.items()}
    for requirement in metadata.requires if metadata else ():
        if requirement.marker is None or requirement.marker.evaluate(environment):
            yield requirement


def _locked_python(wheels: Sequence[ListedWheel]) -> str:
    found = (wheel.entry.facts.get("python") for wheel in wheels if not wheel.built)
    return next((str(python) for python in found if python), "")


def _nccl(cpu: str, wheels: Sequence[ListedWheel]) -> Iterator[Finding]:  # noqa: ARG001
    """Find an NCCL that is not the one torch pins, where torch's own METADATA is not at hand."""
    if any(wheel.project == "torch" and wheel.metadata for wheel in wheels):
        return
    nccl = next((wheel for wheel in wheels if wheel.project.startswith(_NCCL)), None)
    pins = {w.filename: w.metadata.pins.get("torch", "") for w in wheels if w.metadata}
    locked = {w.filename: w.entry.name.version.public for w in wheels if w.project == "torch"}
    for filename, torch in (pins if any(pins.values()) else locked).items():
        pin = load_facts().pin_of_torch(torch)
        wanted = pin.version if pin else None
        if nccl and wanted and Version(nccl.entry.name.version.public) != wanted:
            yield finding(
                UsageError,
                filename,
                f"is for torch {torch}, which pins NCCL {wanted}; here is {nccl.entry.name.pinned}",
                _instead(nccl, wanted),
                "beside that torch pip replaces it by stock's, or installs nothing",
            )


def _torch_and_cuda(cpu: str, wheels: Sequence[ListedWheel]) -> Iterator[Finding]:
    """Find a second CUDA, or a torch that has none."""
    majors: dict[int, str] = {}
    for wheel in wheels:
        for binary in wheel.binaries:
            majors.update(dict.fromkeys(cuda_majors(binary), wheel.filename))
    for wheel in wheels:
        if wheel.project == "torch" and wheel.metadata:
            requires = map(str, _applicable(wheel.metadata, cpu, wheels))
            torch = torch_of(wheel.entry.name.version, requires, wheel.metadata.members)
            if torch.cuda is None:
                what = f"is a torch for CPUs alone: {torch.seen}"
                yield finding(ProofError, wheel.filename, what, _fill(wheel))
            elif torch.cuda:
                majors[torch.cuda] = wheel.filename
    if len(majors) > 1:
        parts = "; ".join(f"CUDA {major}: {name}" for major, name in sorted(majors.items()))
        last = majors[max(majors)]
        what = f"is for another CUDA than what lies beside it: {parts}"
        why = "a process loads both runtimes, and kernels of one do not see tensors of the other"
        yield finding(ProofError, last, what, "take all of it for one CUDA", why)


def _devices(cpu: str, wheels: Sequence[ListedWheel]) -> Iterator[Finding]:
    targets = {wheel.target.name: wheel for wheel in wheels if wheel.target}
    if len(targets) > 1:
        parts = "; ".join(f"{name}: {wheel.filename}" for name, wheel in sorted(targets.items()))
        yield finding(
            UsageError,
            next(reversed(targets.values())).filename,
            f"wheels for {cpu} are made for several devices: {parts}",
            "a wheelhouse for each device: --dir",
            "on either device some of it does not load",
        )


def _pythons(cpu: str, wheels: Sequence[ListedWheel]) -> Iterator[Finding]:  # noqa: ARG001
    """Find wheels for other Pythons than the lock's or, without a lock, than the other wheels'."""
    ranges = {}
    for wheel in wheels:
        unread = WheelMetadata(name=wheel.entry.name, members=(), facts={})
        ranges[wheel.filename] = set(supported(wheel.metadata or unread))
    python = _locked_python(wheels)
    for wheel in wheels:
        if python and int(python.split(".")[1]) not in ranges[wheel.filename]:
            what = f"is not for CPython {python}, for which the dependencies were resolved"
            yield finding(UsageError, wheel.filename, what, _fill(wheel, "--python-version", "X.Y"))
    if not python and ranges and not set.intersection(*ranges.values()):
        few = min(ranges, key=lambda name: len(ranges[name]))
        what = "no Python can install it together with what lies beside it"
        yield finding(UsageError, few, what, "build it for the same Python as the others")


def _systems(cpu: str, wheels: Sequence[ListedWheel]) -> Iterator[Finding]:
    """Find wheels that need a newer glibc than the nodes have."""
    has = min((w.target.glibc for w in wheels if w.target), key=by_version, default="")
    for wheel in wheels:
        needs = promised_glibc(wheel.entry.name.tag)
        if has and needs and by_version(needs) > by_version(has):
            yield finding(
                UsageError,
                wheel.filename,
                f"needs glibc {needs}, nodes with {cpu} may have {has}",
                _fill(wheel) if not wheel.built else "build it on an older distribution",
                "pip does not install it there",
            )


def _uneven(wheels: Sequence[ListedWheel]) -> Iterator[Finding]:
    """Find projects that only nodes of some CPUs can install, or in another version."""
    cpus = {cpu for wheel in wheels if wheel.built for cpu in wheel.entry.name.cpus} - {ANY}
    if len(cpus) < 2:
        return
    projects: dict[str, list[ListedWheel]] = {}
    for wheel in wheels:
        if wheel.built:
            projects.setdefault(wheel.project, []).append(wheel)
    for project, group in projects.items():
        covered = {cpu for wheel in group for cpu in wheel.entry.name.cpus}
        if ANY not in covered and (missing := sorted(cpus - covered)):
            absent = ", ".join(missing)
            what = f"there is no {project} for {absent}, and other wheels for it are here"
            hint = "build it, or use a folder for each CPU"
            yield finding(UsageError, group[0].filename, what, hint)
        versions = {wheel.entry.name.version.public for wheel in group}
        if len(versions) > 1:
            what = f"{project} is another version on each CPU: {', '.join(sorted(versions))}"
            hint = "build one version for all nodes"
            why = "nodes that differ do not understand each other"
            yield finding(UsageError, group[-1].filename, what, hint, why)


def pin_table(wheels: Sequence[ListedWheel]) -> Mapping[str, str]:
    """Map projects to versions, of those that decide: vLLM, torch, NCCL, triton."""
    return {
        wheel.project: str(wheel.entry.name.version)
        for wheel in wheels
        if wheel.built or wheel.project in ("torch", "triton") or wheel.project.startswith(_NCCL)
    }


def unmet(wheels: Sequence[ListedWheel]) -> tuple[str, ...]:
    """Return the decisive pins that no wheel here meets, as long as nothing was filled in.

    Of a wheelhouse that was filled, `disagreements` reports what is missing.
    """
    if any(not wheel.built for wheel in wheels):
        return ()
    here = {wheel.project for wheel in wheels}
    pins = {
        f"{name}=={version}": None
        for wheel in wheels
        if wheel.metadata
        for name, version in wheel.metadata.decisive_pins.items()
        if canonicalize_name(name) not in here
    }
    return tuple(pins)
