"""Check a wheel by itself; decide what its libraries are on a device; prove what was compiled.

``recipes/vllm/libraries.toml`` says what a library is for, its fat binaries say what is in it. A
fat binary that does not load either has code for devices of the same major version, and ought to
have loaded, or is for other devices alone. Of a build CMake writes down how each source is
compiled: nothing may be missing in what was linked, or have another arch.
"""

from __future__ import annotations

import enum
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from packaging.version import Version

from patchkit.elf import by_version
from patchkit.errors import BuildError, ProofError, SourceError
from patchkit.finding import Finding, finding
from patchkit.quoting import quoted
from patchkit.recipes.vllm.archs import Group
from patchkit.recipes.vllm.libraries import KnownLibrary, library_table
from patchkit.recipes.vllm.sources import CudaSource, codes_of, default_codes
from patchkit.target import Load, Target, parse_arch
from patchkit.wheel.device.inspect import Binary, best, fat_binaries
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.metadata import WheelMetadata


class Use(enum.StrEnum):
    """Use of a library on the device."""

    LOADS = "loads"
    PARTLY = "loads in part"
    HOST = "runs on the CPU"
    JIT = "compiles on the device"
    OTHER = "for other devices"
    LOST = "does not load"
    ABSENT = "is missing"
    UNKNOWN = "not in the table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A library of a wheel, or one that it lacks.

    ``loads`` counts its fat binaries by how they reach the device. ``lost`` are the archs of those
    that do not, although they have code for devices of the same major version, and how many.
    """

    name: str
    use: Use
    known: KnownLibrary | None
    loads: Counter[Load] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)

    @property
    def fatal(self) -> bool:
        """True if vLLM cannot do without it on the device."""
        return bool(self.known and self.known.required) and self.missed

    @property
    def missed(self) -> bool:
        return self.use in (Use.LOST, Use.ABSENT)

    @property
    def phrase(self) -> str:
        """Its use on the device, in one phrase."""
        use = str(self.use.value)
        if self.missed and self.known:
            return f"{use}: {self.known.cost}"
        if self.use is not Use.PARTLY:
            return use
        archs = " and ".join(self.lost)
        return f"{use}; fat binaries with {archs} alone do not, {self.lost.total()}"


def judge_libraries(
    binaries: Sequence[Binary], target: Target, version: Version
) -> tuple[Judged, ...]:
    """Judge each library of a wheel on the device, and those that a release ought to have."""
    expected = [known for known in library_table().library if known.covers(version)]
    found = []
    for binary in binaries:
        known = next(
            (known for known in expected if fnmatchcase(binary.name, known.file)), None
        )
        lost: Counter[str] = Counter()
        for group in fat_binaries(binary.live):
            names = sorted(
                {entry.name for entry in group if entry.arch.major == target.major}
            )
            if names and best(group, target) is Load.NONE:
                lost[", ".join(names)] += 1
        if known is None:
            use = Use.UNKNOWN
        elif not known.used_on(target):
            use = Use.OTHER
        elif known.code != "embedded":
            use = Use.JIT if known.code == "jit" else Use.HOST
        elif binary.load(target) is Load.NONE:
            use = Use.LOST
        else:
            use = Use.PARTLY if lost else Use.LOADS
        loads = binary.loads(target)
        found.append(
            Judged(name=binary.name, use=use, known=known, loads=loads, lost=lost)
        )
    present = [library.known for library in found]
    absent = [
        known for known in expected if known not in present and known.used_on(target)
    ]
    return (*found, *(Judged(name=it.file, use=Use.ABSENT, known=it) for it in absent))


def require_loading(judged: Iterable[Judged], target: Target, version: Version) -> None:
    """Raise ProofError that names each library that vLLM cannot do without on the device."""
    if fatal := [library for library in judged if library.fatal]:
        raise ProofError(
            f"the wheel's kernels do not serve {target.title}\n"
            + "\n".join(f"  {library.name}: {library.phrase}" for library in fatal),
            why="it was built for other devices, or parts of it were left out",
            hint=from_source(version, target),
        )


def from_source(version: Version, target: Target) -> str:
    """Return the hint for a wheel whose kernels do not serve a device."""
    words = ("--version", version.public, "--target", target.name)
    return f"build it from source: {quoted('patchkit', 'build', 'vllm', *words)}"


def cuda_major(binaries: Iterable[Binary]) -> str:
    """Return the CUDA that libraries are linked with. Raises ProofError for none, or several."""
    found = sorted({str(major) for binary in binaries for major in binary.cuda})
    if len(found) == 1:
        return found[0]
    raise ProofError(
        f"the wheel's libraries need {' and '.join(found) or 'no'} libcudart",
        why="it holds libraries of several builds"
        if found
        else "it is a build for the CPU alone",
        hint="name upstream's wheel: patchkit repack vllm==X.Y.Z",
    )


def floor(binaries: Sequence[Binary]) -> dict[str, str]:
    """Return the highest symbol version of each family that any of them needs, ``GLIBC_2.34``."""
    highest = {}
    for family in ("GLIBC", "GLIBCXX", "CXXABI"):
        needed = (binary.library.highest(family) for binary in binaries)
        if version := max(needed, key=by_version, default=""):
            highest[family] = version
    return highest


# ld.so(8): the loader puts the library's own folder in its place.
_ORIGIN = ("$ORIGIN", "${ORIGIN}")


def check_wheel(
    metadata: WheelMetadata, binaries: Sequence[Binary]
) -> Iterator[Finding]:
    """Find everything that is wrong with one wheel, from what was read of it."""
    filename, rules = metadata.name.filename, library_rules()
    for fault in metadata.faults:
        yield finding(SourceError, filename, fault, "build it again")
    glibc, majors = rules.promised_glibc(metadata.name.tag), dict[int, list[str]]()
    for binary in binaries:
        yield from _check_library(binary, glibc)
        for major in binary.cuda:
            majors.setdefault(major, []).append(binary.name)
    for member in metadata.members:
        if shared := rules.foreign(metadata.name.project, member):
            owners = [
                owner.replace("nvidia-*", "NVIDIA's wheels") for owner in shared.owners
            ]
            what = f"is a private copy of a library of {' or '.join(owners) or 'the driver'}"
            hint = "leave it out (auditwheel repair --exclude), and let the loader find the one"
            why = "a process with two of them has two CUDA contexts, or crashes"
            yield finding(SourceError, member, what, hint, why)
    if len(majors) > 1:
        what = f"its libraries need {len(majors)} versions of CUDA"
        why = "; ".join(
            f"CUDA {major}: {', '.join(names)}" for major, names in majors.items()
        )
        yield finding(
            SourceError, filename, what, "build all of it with one toolkit", why
        )


def _check_library(binary: Binary, glibc: str) -> Iterator[Finding]:
    """Find what it takes from the machine that built it, and a newer system than ``glibc``'s."""
    library = binary.library
    for label, folders in (("RPATH", library.rpath), ("RUNPATH", library.runpath)):
        for folder in folders:
            if not folder.startswith(_ORIGIN):
                what = f"{label} {folder} is a folder of the machine that built it"
                hint = "link without it, or take it out with patchelf"
                why = "libraries are taken from there if somebody has such a folder"
                yield finding(SourceError, binary.name, what, hint, why)
    if not glibc:
        return
    # The highest symbol version of each family on a system with this glibc.
    limits = library_rules().libstdcxx
    known = [older for older in limits if by_version(older) <= by_version(glibc)]
    newest = limits[max(known, key=by_version)] if known else {}
    for family, limit in {"GLIBC": glibc, **newest}.items():
        needed = library.highest(family)
        if by_version(needed) > by_version(f"{family}_{limit}"):
            what = (
                f"needs {needed}, the name of the wheel promises {glibc} to be enough"
            )
            hint = "give the wheel the tag that auditwheel shows for it"
            why = "pip installs it where it cannot be loaded"
            yield finding(SourceError, binary.name, what, hint, why)


def missed(
    version: Version, judged: Sequence[Judged], target: Target, filename: str = ""
) -> Iterator[Finding]:
    """Find libraries of vLLM that the device lacks, and say what that costs."""
    for library in judged:
        if library.missed:
            what = f"{library.name} {library.phrase}" if filename else library.phrase
            why = (
                "vLLM cannot do without it" if library.fatal else "vLLM does without it"
            )
            hint = from_source(version, target)
            yield finding(ProofError, filename or library.name, what, hint, why)


# nvcc's -gencode arch=compute_121a,code=sm_121a; one code= may hold a list of several.
_CODE = re.compile(r"code=(\S+)")
# CMake puts the objects of a target below CMakeFiles/TARGET.dir/.
_LIBRARY = re.compile(r"-o (?:\S*/)?CMakeFiles/([\w.+-]+)\.dir/")


def compiled_sources(build: Path, source: Path) -> tuple[CudaSource, ...]:
    """Read the CUDA sources below ``build`` from CMake's compile_commands.json.

    Paths are relative to ``source`` where they are in it. Raises BuildError if there is none.
    """
    found = sorted(build.rglob("compile_commands.json"))
    if not found:
        raise BuildError(f"{build}: CMake left no compile_commands.json")
    sources = []
    for entry in json.loads(found[0].read_text(encoding="utf-8")):
        path, command = Path(entry["file"]), entry["command"]
        if path.suffix != ".cu":
            continue
        library = _LIBRARY.search(command)
        if library is None:
            raise BuildError(f"{path}: CMake does not say which library it is for")
        name = path.relative_to(source) if path.is_relative_to(source) else path
        codes = codes_of(_CODE.findall(command))
        sources.append(CudaSource(str(name), library[1], codes or default_codes()))
    return tuple(sources)


def prove_groups(groups: Iterable[Group], sources: Sequence[CudaSource]) -> str:
    """Prove that nvcc compiles each kernel group for the archs of the arch proof; say so.

    A group is known by its first CUDA source; one whose name several sources share is left aside.
    Raises ProofError.
    """
    held = 0
    for group in (group for group in groups if group.archs):
        found = [
            source
            for source in sources
            if f"/{source.source}".endswith(f"/{group.name}.cu")
        ]
        if len(found) != 1:
            continue
        said = {code for arch in group.archs for code in parse_arch(arch).codes}
        if said != found[0].names:
            raise ProofError(
                f"{found[0].source} is compiled for {' and '.join(sorted(found[0].names))}, and "
                f"{group.where} says {' and '.join(sorted(said))}",
                why="CMake was given another arch list, or other files than those that were proved",
                hint="run again with --fresh",
            )
        held += 1
    # A comparison of nothing must not pass for a proof.
    if not held:
        raise ProofError(
            "no kernel group of the arch proof is among what CMake compiles"
        )
    return f"{held} kernel groups are compiled for the archs that were proved"


def prove_compiled(
    sources: Sequence[CudaSource], binaries: Iterable[Binary], target: Target
) -> tuple[str, ...]:
    """Prove that each library holds what its sources were compiled to; say so of each library.

    Raises ProofError.
    """
    libraries = {
        PurePosixPath(binary.name).name.partition(".")[0]: binary for binary in binaries
    }
    by_library: dict[str, list[CudaSource]] = {}
    for source in sources:
        by_library.setdefault(source.library, []).append(source)
    for name in by_library.keys() - libraries.keys():
        raise ProofError(
            f"{name} was compiled, and is not in the wheel",
            why="it was linked, and not installed",
            hint="run again with --fresh",
        )
    proofs = []
    for name, own in sorted(by_library.items()):
        binary, expected = libraries[name], Counter(source.names for source in own)
        # By name: an arch that a fat binary tells also knows whether PTX is beside it.
        linked = Counter(
            frozenset(entry.name for entry in group)
            for group in fat_binaries(binary.live)
        )
        if missing := expected - linked:
            names, count = next(iter(missing.items()))
            first = next(source.source for source in own if source.names == names)
            raise ProofError(
                f"{binary.name} lacks {count} of {expected[names]} fat binaries with "
                f"{' and '.join(sorted(names))}, what {first} for example was compiled to",
                why="objects of another build were linked",
                hint="run again with --fresh",
            )
        exact = sum(source.load(target) is Load.EXACT for source in own)
        proof = f"{exact} of {len(own)} CUDA sources are exact for {target.title}"
        proofs.append(f"{binary.name}: {proof}")
    return tuple(proofs)
