"""Read which device code a library or a wheel holds, and judge how it reaches a device.

A device runs the code in the section ``.nv_fatbin``: the live code. The section ``__nv_relfatbin``
keeps the parts from which the device linker made it. If no live code loads, the driver links the
parts anew at run time, from PTX or machine code of each part ("implicit JIT linking" in NVIDIA's
nvcc manual). Each fat binary holds one set of kernels for several archs, and the driver takes the
best entry that loads.

If a fat binary has no machine code for the device, the driver compiles its PTX when the first of
its kernels is called. It uses one core, and keeps the result in a cache of the user.
"""

import io
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from io import BufferedIOBase
from operator import attrgetter
from pathlib import Path, PurePosixPath

from patchkit.elf import Library, parse_library
from patchkit.errors import ProofError, SourceError
from patchkit.fatbin import CodeEntry, DeviceCode, Entries, read_entries
from patchkit.frozen import Fields, frozen
from patchkit.reading import require_file
from patchkit.records import RECIPES, read_toml
from patchkit.target import Load, Target, parse_arch, targets
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.wheelfile import WheelFile

LIVE = ".nv_fatbin"
RELOCATABLE = "__nv_relfatbin"
SECONDS_PER_MB = 4.1
"""Seconds that the driver needs for 10**6 bytes of PTX.

Measured with FlashAttention 2, driver 580, one core of an H200's host: 45.9 s for 11.3 MB, 80.2 s
for 19.7 MB.
"""


@dataclass(frozen=True, slots=True)
class CodeSummary(DeviceCode):
    """A summary of ``count`` entries of one sort; ``size`` is the sum of their stored bytes."""

    compression: str
    section: str
    count: int
    size: int


@frozen
class Binary:
    """An ELF file with its device code. ``size`` is in bytes.

    ``name`` is the name of the file, or its path in the wheel. ``cuda`` are the major versions of
    CUDA whose libraries the file needs. ``live`` and ``relocatable`` are the entries of
    ``.nv_fatbin`` and ``__nv_relfatbin``.
    """

    name: str
    size: int
    cuda: tuple[int, ...]
    library: Library
    live: Entries
    relocatable: Entries

    @property
    def codes(self) -> tuple[CodeSummary, ...]:
        """Return the entries, summarized by section, kind, arch and compression."""
        live = _summarize(self.live, LIVE)
        return (*live, *_summarize(self.relocatable, RELOCATABLE))

    @property
    def fat_binaries(self) -> tuple[Entries, ...]:
        """Return the entries of each live fat binary."""
        return _grouped(self.live)

    def loads(self, target: Target) -> Counter[Load]:
        """Count the live fat binaries by how they reach the device."""
        return Counter(best_reach(group, target) for group in self.fat_binaries)

    def load(self, target: Target) -> Load:
        """Return the best way in which code of this file reaches the device."""
        if self.linked_anew(target):
            return Load.JIT  # linking takes time at first use, as compiling PTX does
        return best_reach(self.live, target)

    def linked_anew(self, target: Target) -> bool:
        """Return whether no live code loads, but every part loads, so the driver can link anew."""
        if not self.live or not self.relocatable:
            return False
        if best_reach(self.live, target) is not Load.NONE:
            return False
        return all(best_reach(part, target) for part in _grouped(self.relocatable))


Binaries = Sequence[Binary]


def _summarize(entries: Iterable[CodeEntry], section: str) -> list[CodeSummary]:
    sizes = defaultdict(list)
    for entry in entries:
        sizes[entry.kind, entry.arch, entry.compression].append(entry.size)
    codes = [
        CodeSummary(*sort, section, len(stored), sum(stored))
        for sort, stored in sizes.items()
    ]
    return sorted(codes, key=lambda code: (code.kind != "sass", *astuple(code)[:3]))


def inspect_file(path: Path) -> Binary:
    """Read a shared library.

    Raises UsageError if there is no such file, SourceError if it is damaged or of another kind.
    """
    require_file(path, "give a shared library or a wheel")
    with path.open("rb") as stream:
        return _read_binary(path.name, stream, str(path))


def inspect_wheel(
    wheel: WheelFile,
    only: Collection[str] | None = None,
) -> tuple[Binary, ...]:
    """Read each library and program in a wheel; ``only`` limits this to some paths.

    Raises SourceError if a library is damaged or for another CPU than the wheel's name says.
    """
    binaries = wheel.read_libraries(
        lambda name, member: _read_binary(name, member, f"{wheel.path}: {name}"),
        only,
    )
    # Only CPUs of known targets can be compared: names of other CPUs may differ in ELF and in tags.
    promised = wheel.name.cpus & {target.cpu for target in targets().values()}
    for binary in binaries:
        cpu = binary.library.machine
        if promised and cpu not in promised:
            cpus = " or ".join(sorted(promised))
            raise SourceError(
                f"{wheel.path}: {binary.name} is for {cpu}",
                why=f"the wheel's name says {cpus}; pip would install it where it cannot be loaded",
                hint="build the wheel again, with the library of the right CPU",
            )
    return tuple(binaries)


def _read_binary(name: str, stream: BufferedIOBase, where: str) -> Binary:
    library = parse_library(stream, where)
    if library.machine == "cuda":
        raise SourceError(
            f"{where} is bare device code",
            hint="give the library that it goes into",
        )

    def read_section(kind: str) -> Entries:
        sections = [section for section in library.sections if section.name == kind]
        return read_entries(stream, sections, where)

    return Binary(
        name=name,
        size=stream.seek(0, io.SEEK_END),
        cuda=library_rules().cuda_majors(library.needed),
        library=library,
        live=read_section(LIVE),
        relocatable=read_section(RELOCATABLE),
    )


def best_reach(entries: Iterable[CodeEntry], target: Target) -> Load:
    """Return the best way in which one of the entries reaches the device; NONE if none does."""
    return max((entry.reach(target) for entry in entries), default=Load.NONE)


def prove_exact(
    binary: Binary,
    target: Target,
    *,
    cpu: str,
) -> None:
    """Raise ProofError unless a library's own kernels are built for the target, and nothing else.

    Every live fat binary must have machine code for the target's capability, and for no other; of
    some libraries, which ``recipes/wheel_rules.toml`` names, it may be for the target's family. Two
    things are ignored: kernels that NCCL's makefiles always add (``recipes/nccl/kernels.toml``)
    and PTX beside exact machine code, which the driver never compiles on the target. ``cpu`` is the
    CPU of the build: a library for another one is an error, too.
    """
    machine = binary.library.machine
    if machine != cpu:
        raise ProofError(
            f"{binary.name} is for {machine}, not for {cpu}",
            why="the compiler of the host code was one for another CPU",
        )

    exact = 0
    foreign: list[CodeEntry] = []
    of_family = library_rules().of_family.cover(PurePosixPath(binary.name).name)
    least = Load.FAMILY if of_family else Load.EXACT
    for group in _own_binaries(binary):
        entries = [entry for entry in group if entry.reach(target) < least]
        exact += len(group) - len(entries)
        # The driver does not compile PTX of a fat binary that has exact machine code.
        is_exact = len(entries) < len(group)
        foreign += [entry for entry in entries if not is_exact or entry.kind != "ptx"]
    if foreign or not exact:
        raise _inexact_error(binary, target, exact, foreign)


def _inexact_error(
    binary: Binary,
    target: Target,
    exact: int,
    foreign: Sequence[CodeEntry],
) -> ProofError:
    number = "{}{}".format(*target.capability)
    count = f"{exact} live entries are sm_{number}"
    reason = "it holds no device code, or only what NCCL's makefiles always add"
    if foreign:
        names = Counter(entry.name for entry in foreign)
        listing = ", ".join(f"{count} {name}" for name, count in names.items())
        place = f"the first at byte {foreign[0].container} of the file"
        count += f", {len(foreign)} are not: {listing} ({place})"
        reason = "it was built for other archs, or for more than this one"

    return ProofError(
        f"{binary.name} is not exact for {target.title}: {count}",
        why=reason,
        hint=f"build with NVCC_GENCODE=-gencode=arch=compute_{number},code=sm_{number}",
    )


def _own_binaries(binary: Binary) -> Iterator[Entries]:
    """Yield the live fat binaries, except those that NCCL's makefiles add for any target."""
    table = RECIPES / "nccl" / "kernels.toml"
    rows = read_toml(tuple[Fields, ...], table, key="always")
    always = {("sass", parse_arch(row["arch"])) for row in rows}
    for group in binary.fat_binaries:
        if not {(entry.kind, entry.arch) for entry in group} <= always:
            yield group


def _grouped(entries: Iterable[CodeEntry]) -> tuple[Entries, ...]:
    """Return the entries grouped by fat binary."""
    groups = defaultdict(list)
    for entry in entries:
        groups[entry.container].append(entry)
    return tuple(map(tuple, groups.values()))


def jit_entries(binary: Binary, target: Target) -> Entries:
    """Return the PTX that the driver compiles for the device: one entry for each such fat binary.

    Only live fat binaries count, and those that have no machine code for the device.
    """
    return tuple(
        _newest_ptx(group, target)
        for group in binary.fat_binaries
        if best_reach(group, target) is Load.JIT
    )


def _newest_ptx(group: Iterable[CodeEntry], target: Target) -> CodeEntry:
    """Return the PTX that the driver compiles: the one for the newest arch that the device runs."""
    usable = [
        entry
        for entry in group
        if entry.kind == "ptx" and entry.reach(target) is Load.JIT
    ]
    return max(usable, key=attrgetter("arch.capability", "arch.suffix"))


def compile_seconds(entries: Iterable[CodeEntry]) -> float:
    """Return an estimate of the seconds that the driver needs for all entries, on one core."""
    return sum(entry.unpacked_size for entry in entries) / 1e6 * SECONDS_PER_MB


def first_use_phrase(entries: Collection[CodeEntry]) -> str:
    """Return a phrase: how many fat binaries are compiled, and the seconds for one and for all.

    ``entries`` must not be empty.
    """
    noun = "fat binary is" if len(entries) == 1 else "fat binaries are"
    longest = max(compile_seconds([entry]) for entry in entries)
    return (
        f"{len(entries)} {noun} compiled at first use, each on one core: up to "
        f"{longest:.0f} s for one, {compile_seconds(entries):.0f} s for all"
    )
