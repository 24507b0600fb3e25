"""Read which device code a library or a wheel holds, and how it reaches a device.

A device runs code from ``.nv_fatbin``: that is the live code. ``__nv_relfatbin`` keeps what the
device linker was given; only if nothing live loads, the driver links it anew, on the device, from
PTX or machine code of each part (NVIDIA's nvcc manual, implicit JIT linking). Each fat binary holds
one set of kernels for several archs, and the driver takes the best that loads.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import astuple, dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from patchkit.elf import Library, parse_library
from patchkit.errors import ProofError, SourceError
from patchkit.reading import require_file
from patchkit.records import RECIPES, read_toml
from patchkit.target import Arch, Load, Target, parse_arch, targets
from patchkit.wheel.device.fatbin import CodeEntry, DeviceCode, read_entries
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.wheelfile import WheelFile

LIVE = ".nv_fatbin"
RELOCATABLE = "__nv_relfatbin"


@dataclass(frozen=True, slots=True)
class CodeSummary(DeviceCode):
    """Entries of one sort: ``count`` of them, with ``size`` bytes in all as they are stored."""

    compression: str
    section: str
    count: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """An ELF file: ``name`` is the file's, or its path in the wheel; ``size`` is in bytes.

    ``cuda`` are the major versions of CUDA whose libraries it asks the loader for.
    """

    name: str
    size: int
    cuda: tuple[int, ...]
    library: Library
    live: tuple[CodeEntry, ...]
    relocatable: tuple[CodeEntry, ...]

    @property
    def codes(self) -> tuple[CodeSummary, ...]:
        """The entries by section, kind, arch and compression."""
        live = _summarize(self.live, LIVE)
        return (*live, *_summarize(self.relocatable, RELOCATABLE))

    def loads(self, target: Target) -> Counter[Load]:
        """Count the live fat binaries by how they reach the device."""
        return Counter(best_load(group, target) for group in fat_binaries(self.live))

    def load(self, target: Target) -> Load:
        """Return the best way that code of this binary reaches the device."""
        if self.linked_anew(target):
            return Load.JIT  # the driver takes time on the device for it, as for PTX
        return best_load(self.live, target)

    def linked_anew(self, target: Target) -> bool:
        """Check whether live code does not load, but all that it was linked from does."""
        parts = fat_binaries(self.relocatable)
        is_lost = bool(self.live) and best_load(self.live, target) is Load.NONE
        return (
            is_lost and bool(parts) and all(best_load(part, target) for part in parts)
        )


def _summarize(entries: Iterable[CodeEntry], section: str) -> list[CodeSummary]:
    sizes: dict[tuple[str, Arch, str], list[int]] = {}
    for entry in entries:
        sort = (entry.kind, entry.arch, entry.compression)
        sizes.setdefault(sort, []).append(entry.size)
    return sorted(
        (CodeSummary(*sort, section, len(of), sum(of)) for sort, of in sizes.items()),
        key=lambda code: (code.kind != "sass", *astuple(code)[:3]),
    )


def inspect_file(path: Path) -> tuple[Binary, ...]:
    """Read a shared library, or each library and program in a wheel.

    Raises UsageError if there is no such file; SourceError if it is neither, or damaged; and what
    ``inspect_wheel`` raises.
    """
    require_file(path, "give a shared library or a wheel")
    if path.suffix == ".whl":
        with WheelFile(path) as wheel:
            return inspect_wheel(wheel)
    with path.open("rb") as stream:
        return (_read_binary(path.name, stream, str(path)),)


def inspect_wheel(
    wheel: WheelFile, only: Collection[str] | None = None
) -> tuple[Binary, ...]:
    """Read each library and program in a wheel, or those among the paths of ``only``.

    Raises SourceError if one is damaged or for another CPU than the wheel's name says; if there is
    none in the whole wheel.
    """
    # ELF's names of other CPUs are not known here.
    promised = wheel.name.cpus & {target.cpu for target in targets().values()}
    binaries = wheel.read_libraries(
        lambda name, member: _read_binary(name, member, f"{wheel.path}: {name}"), only
    )
    for binary in binaries:
        cpu = binary.library.machine
        if promised and cpu not in promised:
            cpus = " or ".join(sorted(promised))
            raise SourceError(
                f"{wheel.path}: {binary.name} is for {cpu}",
                why=f"the wheel's name says {cpus}; pip would install it where it cannot be loaded",
                hint="build the wheel again, with the library of the right CPU",
            )

    if not binaries and only is None:
        raise SourceError(
            f"{wheel.path} holds no library",
            why="it is a wheel of Python alone",
            hint="name a wheel with compiled libraries",
        )
    return tuple(binaries)


def _read_binary(name: str, stream: BufferedIOBase, where: str) -> Binary:
    library = parse_library(stream, where)
    if library.machine == "cuda":
        hint = "give the library that it goes into"
        raise SourceError(f"{where} is bare device code", hint=hint)

    def entries_of(kind: str) -> tuple[CodeEntry, ...]:
        sections = [section for section in library.sections if section.name == kind]
        return read_entries(stream, sections, where)

    return Binary(
        name=name,
        live=entries_of(LIVE),
        relocatable=entries_of(RELOCATABLE),
        size=stream.seek(0, io.SEEK_END),
        cuda=library_rules().cuda_majors(library.needed),
        library=library,
    )


def best_load(entries: Iterable[CodeEntry], target: Target) -> Load:
    """Return the best way that any of the entries reaches the device; NONE without entries."""
    return max((entry.reach(target) for entry in entries), default=Load.NONE)


def prove_exact(binary: Binary, target: Target, *, cpu: str | None = None) -> None:
    """Raise ProofError unless NCCL's own kernels are built for the target, and for nothing else.

    Every live fat binary must have machine code of the target's own capability and no other. Aside
    are those that NCCL always adds (``recipes/nccl/kernels.toml``), and PTX beside machine code:
    the driver never compiles it here. ``cpu`` is that of the build, else the target's.
    """
    wanted = cpu or target.cpu
    if binary.library.machine != wanted:
        raise ProofError(
            f"{binary.name} is for {binary.library.machine}, not for {wanted}",
            why="the compiler of the host code was one for another CPU",
            hint="" if cpu else f"build it for {wanted}, the CPU of {target.title}",
        )

    groups = list(_own_binaries(binary))
    loads = [entry.reach(target) for group in groups for entry in group]
    exact = loads.count(Load.EXACT)
    foreign = [entry for group in groups for entry in _foreign_entries(group, target)]
    if exact and not foreign:
        return

    number = "{}{}".format(*target.capability)
    what = f"{binary.name} is not exact for {target.title}: {exact} live entries are sm_{number}"
    why = "it holds no device code, or only what NCCL's makefiles always add"
    if foreign:
        counts = Counter(entry.name for entry in foreign)
        names = ", ".join(f"{count} {name}" for name, count in counts.items())
        place = f"the first at byte {foreign[0].container} of the file"
        what += f", {len(foreign)} are not: {names} ({place})"
        why = "it was built for other archs, or for more than this one"
    hint = f"build with NVCC_GENCODE=-gencode=arch=compute_{number},code=sm_{number}"
    raise ProofError(what, why=why, hint=hint)


def _foreign_entries(group: Collection[CodeEntry], target: Target) -> list[CodeEntry]:
    """Return what is not exact, without PTX beside exact machine code."""
    entries = [entry for entry in group if entry.reach(target) is not Load.EXACT]
    if len(entries) == len(group):
        return entries
    return [entry for entry in entries if entry.kind != "ptx"]


def _own_binaries(binary: Binary) -> Iterator[tuple[CodeEntry, ...]]:
    """Yield the fat binaries but those that NCCL always adds: one arch alone, one of a table."""
    table = RECIPES / "nccl" / "kernels.toml"
    rows = read_toml(tuple[dict[str, Any], ...], table, key="always")
    always = {("sass", parse_arch(row["arch"])) for row in rows}
    for group in fat_binaries(binary.live):
        if not {(entry.kind, entry.arch) for entry in group} <= always:
            yield group


def fat_binaries(entries: Iterable[CodeEntry]) -> tuple[tuple[CodeEntry, ...], ...]:
    """Group entries by fat binary: a device takes one entry of each binary."""
    groups: dict[int, list[CodeEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.container, []).append(entry)
    return tuple(map(tuple, groups.values()))
