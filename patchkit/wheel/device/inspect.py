"""Read which device code a library or a wheel holds, and how it reaches a device.

A device runs code from ``.nv_fatbin``: that is the live code. ``__nv_relfatbin`` keeps what the
device linker was given; only if nothing live loads, the driver links it anew, on the device, from
PTX or machine code of each part (NVIDIA's nvcc manual, implicit JIT linking). Each fat binary holds
one set of kernels for several archs, and the driver takes the best that loads.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Collection, Iterable
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

LIVE, RELOCATABLE = ".nv_fatbin", "__nv_relfatbin"


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
        found = []
        for section, entries in ((LIVE, self.live), (RELOCATABLE, self.relocatable)):
            sizes: dict[tuple[str, Arch, str], list[int]] = {}
            for entry in entries:
                sort = (entry.kind, entry.arch, entry.compression)
                sizes.setdefault(sort, []).append(entry.size)
            codes = [
                CodeSummary(*sort, section, len(of), sum(of))
                for sort, of in sizes.items()
            ]
            found += sorted(
                codes, key=lambda code: (code.kind != "sass", *astuple(code)[:3])
            )
        return tuple(found)

    def loads(self, target: Target) -> Counter[Load]:
        """Count the live fat binaries by how they reach the device."""
        return Counter(best(group, target) for group in fat_binaries(self.live))

    def load(self, target: Target) -> Load:
        """Return the best way that code of this binary reaches the device."""
        # The driver links it again on the device, which takes time there as PTX does.
        return Load.JIT if self.linked_anew(target) else best(self.live, target)

    def linked_anew(self, target: Target) -> bool:
        """Check whether live code does not load, but all that it was linked from does."""
        parts = fat_binaries(self.relocatable)
        lost = bool(self.live) and best(self.live, target) is Load.NONE
        return lost and bool(parts) and all(best(part, target) for part in parts)


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
    found = wheel.read_libraries(
        lambda name, it: _read_binary(name, it, f"{wheel.path}: {name}"), only
    )
    for binary in found if promised else ():
        if binary.library.machine not in promised:
            raise SourceError(
                f"{wheel.path}: {binary.name} is for {binary.library.machine}",
                why=f"the wheel's name says {' or '.join(sorted(promised))}; pip would install it "
                "where it cannot be loaded",
                hint="build the wheel again, with the library of the right CPU",
            )
    if not found and only is None:
        raise SourceError(
            f"{wheel.path} holds no library",
            why="it is a wheel of Python alone",
            hint="name a wheel with compiled libraries",
        )
    return tuple(found)


def _read_binary(name: str, stream: BufferedIOBase, where: str) -> Binary:
    library = parse_library(stream, where)
    if library.machine == "cuda":
        raise SourceError(
            f"{where} is bare device code", hint="give the library that it goes into"
        )
    live, relocatable = (
        read_entries(stream, [it for it in library.sections if it.name == kind], where)
        for kind in (LIVE, RELOCATABLE)
    )
    return Binary(
        name=name,
        size=stream.seek(0, io.SEEK_END),
        cuda=library_rules().cuda_majors(library.needed),
        library=library,
        live=live,
        relocatable=relocatable,
    )


def best(entries: Iterable[CodeEntry], target: Target) -> Load:
    """Return the best way that any of the entries reaches the device; NONE without entries."""
    return max((entry.reach(target) for entry in entries), default=Load.NONE)


def prove_exact(binary: Binary, target: Target, *, cpu: str | None = None) -> None:
    """Raise ProofError unless NCCL's own kernels are built for the target, and for nothing else.

    Every live fat binary must have machine code of the target's own capability and no other. Aside
    are those that NCCL always adds (``recipes/nccl/kernels.toml``), and PTX beside machine code:
    the driver never compiles it here. ``cpu`` is that of the build, else the target's.
    """
    table = read_toml(
        tuple[dict[str, Any], ...], RECIPES / "nccl" / "kernels.toml", key="always"
    )
    wanted, always = (
        cpu or target.cpu,
        {("sass", parse_arch(row["arch"])) for row in table},
    )
    if binary.library.machine != wanted:
        raise ProofError(
            f"{binary.name} is for {binary.library.machine}, not for {wanted}",
            why="the compiler of the host code was one for another CPU",
            hint=f"build it for {wanted}, the CPU of {target.title}"
            if cpu is None
            else "",
        )
    own, others = 0, []
    for group in fat_binaries(binary.live):
        # Code that NCCL adds stands alone: one arch, one of those known.
        if not {(entry.kind, entry.arch) for entry in group} <= always:
            exact = [e for e in group if e.reach(target) is Load.EXACT]
            own += len(exact)
            others += [
                e for e in group if e not in exact and not (exact and e.kind == "ptx")
            ]
    if others or not own:
        number = "{}{}".format(*target.capability)
        counts = Counter(entry.name for entry in others)
        listed = ", ".join(f"{count} {name}" for name, count in counts.items())
        first = (
            f" (the first at byte {others[0].container} of the file)" if others else ""
        )
        raise ProofError(
            f"{binary.name} is not exact for {target.title}: {own} live entries are sm_{number}"
            + (f", {len(others)} are not: {listed}{first}" if others else ""),
            why="it was built for other archs, or for more than this one"
            if others
            else "it holds no device code, or only what NCCL's makefiles always add",
            hint=f"build with NVCC_GENCODE=-gencode=arch=compute_{number},code=sm_{number}",
        )


def fat_binaries(entries: Iterable[CodeEntry]) -> tuple[tuple[CodeEntry, ...], ...]:
    """Group entries by fat binary: a device takes one entry of each binary."""
    groups: dict[int, list[CodeEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.container, []).append(entry)
    return tuple(map(tuple, groups.values()))
