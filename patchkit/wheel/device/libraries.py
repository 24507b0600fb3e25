"""Check a wheel by itself, judge its libraries for a device, and prove how they were compiled.

``recipes/PROJECT/libraries.toml`` tells the purpose of each library; its fat binaries tell for
which devices it has code. A fat binary that does not load on the device is either for other
devices, or lost: it has code for the same major version of the capability, but not for this minor
version.

For the proof, CMake's compile_commands.json tells how a build compiles each source. Each library
must hold the code of all its sources, for the archs that were requested.
"""

import enum
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath

from patchkit.elf import by_version
from patchkit.errors import BuildError, ProofError, SourceError
from patchkit.finding import Findings, finding
from patchkit.frozen import Texts, Values, frozen, positional
from patchkit.recipes.vllm.archs import Group
from patchkit.records import read_toml
from patchkit.source.project import project_named, projects, recipe_folders
from patchkit.source.releases import ForReleases
from patchkit.target import Load, Target, best_load, list_archs, parse_arch, toolkits
from patchkit.wheel.device.inspect import Binaries, Binary, best_reach, inspect_wheel
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.wheelfile import (
    WheelFile,
    WheelMetadata,
    WheelName,
    read_metadata,
)


@frozen
class KnownLibrary(ForReleases):
    """An entry of ``libraries.toml``, which describes the fields."""

    file: str
    devices: tuple[int, ...]
    code: str
    required: bool
    gives: str
    cost: str

    def used_on(self, target: Target) -> bool:
        return not self.devices or target.major in self.devices


@frozen
class LibraryTable:
    """The tables of ``libraries.toml``."""

    library: tuple[KnownLibrary, ...]
    around: Texts


class Use(enum.StrEnum):
    """How a package can use a library on the device, the worst first."""

    LOST = "does not load"
    ABSENT = "is missing"
    UNKNOWN = "not in the table"
    PARTLY = "loads in part"
    LOADS = "loads"
    JIT = "compiles on the device"
    OTHER = "for other devices"
    HOST = "runs on the CPU"


@frozen
class Judged:
    """The judgement of a library that a wheel holds or should hold.

    ``known`` is its row in the table of libraries, None if it has none. ``loads`` counts its fat
    binaries by how they reach the device. ``lost`` counts those that are lost, by the names of
    their code: ``sm_120a``.
    """

    name: str
    use: Use
    known: KnownLibrary | None
    loads: Counter[Load] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)

    @property
    def fatal(self) -> bool:
        """Return whether the package cannot run on the device as the library is missing or lost."""
        return bool(self.known and self.known.required) and self.missed

    @property
    def missed(self) -> bool:
        return self.use in (Use.LOST, Use.ABSENT)

    @property
    def phrase(self) -> str:
        """Return a phrase that says how the library can be used, or what its loss costs."""
        if self.missed and self.known:
            return f"{self.use.value}: {self.known.cost}"
        if self.use is not Use.PARTLY:
            return self.use.value

        archs = " and ".join(self.lost)
        return f"{self.use.value}; fat binaries with {archs} alone do not, {self.lost.total()}"


Judgements = Sequence[Judged]


@cache
def library_table(project: str) -> LibraryTable:
    """Return ``libraries.toml`` of a project; an empty table if its recipe has none."""
    for folder in recipe_folders(project_named(project)):
        place = folder / "libraries.toml"
        if place.is_file():
            return read_toml(LibraryTable, place)
    return LibraryTable(library=(), around=())


def judge_libraries(
    binaries: Binaries,
    target: Target,
    name: WheelName,
) -> Judgements:
    """Judge each library of a wheel, and each that the wheel lacks and the device would use.

    Return nothing for a project whose recipe has no table of libraries.
    """
    table = library_table(name.project).library
    expected = [entry for entry in table if entry.covers(name.version)]
    if not table:
        return ()
    judged = [_judge_binary(binary, expected, target) for binary in binaries]
    present = [library.known for library in judged]

    for entry in expected:
        if entry not in present and entry.used_on(target):
            absent = Judged(name=entry.file, use=Use.ABSENT, known=entry)
            judged.append(absent)
    return tuple(judged)


def _judge_binary(
    binary: Binary,
    expected: list[KnownLibrary],
    target: Target,
) -> Judged:
    matches = (entry for entry in expected if fnmatchcase(binary.name, entry.file))
    entry = next(matches, None)
    lost = _lost_archs(binary, target)
    return Judged(
        name=binary.name,
        use=_use_of(binary, entry, target, bool(lost)),
        known=entry,
        loads=binary.loads(target),
        lost=lost,
    )


def _lost_archs(binary: Binary, target: Target) -> Counter[str]:
    lost = Counter[str]()
    for group in binary.fat_binaries:
        names = {entry.name for entry in group if entry.arch.major == target.major}
        if names and best_reach(group, target) is Load.NONE:
            lost[", ".join(sorted(names))] += 1
    return lost


def _use_of(
    binary: Binary,
    entry: KnownLibrary | None,
    target: Target,
    has_lost: bool,
) -> Use:
    if entry is None:
        return Use.UNKNOWN
    if not entry.used_on(target):
        return Use.OTHER
    if entry.code != "embedded":
        return Use.JIT if entry.code == "jit" else Use.HOST
    if binary.load(target) is Load.NONE:
        return Use.LOST
    return Use.PARTLY if has_lost else Use.LOADS


def require_loading(judged: Judgements, target: Target, name: WheelName) -> None:
    """Raise ProofError, naming the libraries, if a package cannot run there without them."""
    fatal = [library for library in judged if library.fatal]
    if not fatal:
        return

    lines = [f"  {library.name}: {library.phrase}" for library in fatal]
    raise ProofError(
        "\n".join([f"the wheel's kernels do not serve {target.title}", *lines]),
        why="it was built for other devices, or parts of it were left out",
        hint=_from_source(name, target),
    )


def _from_source(name: WheelName, target: Target) -> str:
    """Return a hint for a wheel whose kernels do not run on a device: build it from source."""
    release = f"{name.project} --version {name.version.public}"
    return f"build it from source: patchkit build {release} --target {target.name}"


def cuda_major(binaries: Binaries) -> str:
    """Return the major version of CUDA that libraries need: ``13``.

    Raises ProofError if they need none, or several.
    """
    majors = sorted({str(major) for binary in binaries for major in binary.cuda})
    if len(majors) == 1:
        return majors[0]

    reason = "it holds libraries of several builds"
    raise ProofError(
        f"the wheel's libraries need {' and '.join(majors) or 'no'} libcudart",
        why=reason if majors else "it is a build for the CPU alone",
        hint="name the wheel that upstream released, by NAME==X.Y.Z",
    )


def needed_versions(binaries: Binaries) -> Values:
    """Return family → highest symbol version that a library needs: ``GLIBC`` → ``GLIBC_2.34``."""
    highest = {}
    for family in ("GLIBC", "GLIBCXX", "CXXABI"):
        versions = (binary.library.highest(family) for binary in binaries)
        if version := max(versions, key=by_version, default=""):
            highest[family] = version
    return highest


# The loader replaces these by the folder of the library; see ld.so(8).
_ORIGIN = ("$ORIGIN", "${ORIGIN}")


def check_wheel(
    metadata: WheelMetadata,
    binaries: Binaries,
) -> Findings:
    """Yield a finding for everything that is wrong with one wheel, whatever the device.

    It judges the metadata, the paths of the members, and the libraries.
    """
    filename = metadata.name
    for fault in metadata.faults:
        yield finding(SourceError, filename, fault, "build it again")

    glibc = library_rules().promised_glibc(metadata.name.tag)
    place = library_rules().module_paths.get(filename.project)
    for binary in binaries:
        if place and not re.fullmatch(place, binary.name):
            what = f"{binary.name}: no library belongs there"
            yield finding(SourceError, filename, what, "build it again")
        yield from _check_folders(binary)
        if glibc:
            yield from _check_glibc(binary, glibc)
    for member in metadata.members:
        yield from _check_member(metadata.name.project, member)
    yield from _check_cuda(filename, binaries)


def require_portable(sealed: Path) -> tuple[Binary, ...]:
    """Return the libraries of a wheel in which `patchkit inspect` finds no fault.

    Raises ProofError for a fault, such as an RPATH or a copy of a library of torch.
    """
    with WheelFile(sealed) as wheel:
        metadata = read_metadata(wheel)
        binaries = inspect_wheel(wheel)

    faults = list(check_wheel(metadata, binaries))
    if not faults:
        return binaries

    lines = [f"    {fault.where} {fault.what}" for fault in faults]
    raise ProofError(
        "\n".join([f"{sealed.name} would not be fit for other machines", *lines]),
        why="the toolchain added it, or upstream's build changed",
        hint="please report this with the version",
    )


def _check_folders(binary: Binary) -> Findings:
    """Yield a finding for each RPATH or RUNPATH that is a fixed folder of the building machine."""
    library = binary.library
    for label, folders in (("RPATH", library.rpath), ("RUNPATH", library.runpath)):
        for folder in folders:
            if not folder.startswith(_ORIGIN):
                yield finding(
                    SourceError,
                    binary.name,
                    f"{label} {folder} is a folder of the machine that built it",
                    "link without it, or take it out with patchelf",
                    "libraries are taken from there if somebody has such a folder",
                )


def _check_glibc(binary: Binary, glibc: str) -> Findings:
    """Yield a finding for each symbol version that is too new for a system with ``glibc``."""
    # The highest symbol version of each family on such a system.
    limits = {"GLIBC": glibc}
    table = library_rules().libstdcxx
    older = [version for version in table if by_version(version) <= by_version(glibc)]
    if older:
        limits |= table[max(older, key=by_version)]

    for family, limit in limits.items():
        needed = binary.library.highest(family)
        if by_version(needed) > by_version(f"{family}_{limit}"):
            yield finding(
                SourceError,
                binary.name,
                f"needs {needed}, the name of the wheel promises {glibc} to be enough",
                "give the wheel the tag that auditwheel shows for it",
                "pip installs it where it cannot be loaded",
            )


def _check_member(project: str, member: str) -> Findings:
    """Yield a finding if a member is a copy of a library that a process must load only once."""
    if shared := library_rules().foreign(project, member):
        owners = " or ".join(shared.owners).replace("nvidia-*", "NVIDIA's wheels")
        yield finding(
            SourceError,
            member,
            f"is a private copy of a library of {owners or 'the driver'}",
            "leave it out (auditwheel repair --exclude), and let the loader find the one",
            "a process with two of them has two CUDA contexts, or crashes",
        )


def _check_cuda(filename: str, binaries: Binaries) -> Findings:
    """Yield a finding if the libraries of a wheel need different major versions of CUDA."""
    majors = sorted({major for binary in binaries for major in binary.cuda})
    if len(majors) > 1:
        yield finding(
            SourceError,
            filename,
            f"its libraries need CUDA {' and '.join(map(str, majors))}",
            "build all of it with one toolkit",
        )


def missed(
    name: WheelName,
    judged: Judgements,
    target: Target,
    filename: str = "",
) -> Findings:
    """Yield a finding for each library of a package that is missing or does not load on the device.

    The finding says which features that costs. With ``filename``, the finding is about that wheel,
    else about the library.
    """
    for library in judged:
        if library.missed:
            verb = "cannot do" if library.fatal else "does"
            yield finding(
                ProofError,
                filename or library.name,
                f"{library.name} {library.phrase}" if filename else library.phrase,
                _from_source(name, target),
                f"{projects()[project_named(name.project)].title} {verb} without it",
            )


# In nvcc's option -gencode arch=compute_121a,code=sm_121a. It can also be a list.
_CODE = r"code=(\S+)"
_CODE_NAME = r"\b(?:sm|compute)_\d{2,4}[af]?\b"
# CMake puts the objects of a library into CMakeFiles/LIBRARY.dir/.
_LIBRARY = r"-o (?:\S*/)?CMakeFiles/([\w.+-]+)\.dir/"


@positional
class CudaSource:
    """A CUDA source, the library that it is linked into, and the codes it is compiled to.

    ``names`` are the codes as nvcc names them: ``sm_121a``, ``compute_89``.
    """

    source: str
    library: str
    names: frozenset[str]

    def load(self, target: Target) -> Load:
        """Return the best way in which a code reaches a device, ``Load.NONE`` if none does."""
        return best_load(list_archs(self.names), target.capability)


def compiled_sources(build: Path, source: Path) -> tuple[CudaSource, ...]:
    """Read from CMake's compile_commands.json below ``build`` how each CUDA source is compiled.

    A path in the folder ``source`` becomes relative to it. Raises BuildError if there is no such
    file, or if it does not tell the library of a source.
    """
    listings = sorted(build.rglob("compile_commands.json"))
    if not listings:
        raise BuildError(f"{build}: CMake left no compile_commands.json")
    sources = []
    for entry in json.loads(listings[0].read_text("utf-8")):
        path = Path(entry["file"])
        command = entry["command"]
        if path.suffix != ".cu":
            continue

        library = re.search(_LIBRARY, command)
        if library is None:
            raise BuildError(f"{path}: CMake does not say which library it is for")
        name = path.relative_to(source) if path.is_relative_to(source) else path
        codes = re.findall(_CODE_NAME, " ".join(re.findall(_CODE, command)))
        # Without an arch, nvcc compiles to codes that are the same in every toolkit.
        names = frozenset(codes or toolkits()[0].default_codes)
        sources.append(CudaSource(str(name), library[1], names))
    return tuple(sources)


def prove_groups(groups: Iterable[Group], sources: Sequence[CudaSource]) -> str:
    """Prove that nvcc compiles each kernel group for the archs of the arch proof; say how many.

    A group has the name of its first CUDA source. A group whose name no source or several sources
    have is skipped. Raises ProofError if the archs of a group differ, or all groups were skipped.
    """
    proved = 0
    for group in groups:
        file = f"/{group.name}.cu"
        matches = [source for source in sources if f"/{source.source}".endswith(file)]
        if group.archs and len(matches) == 1:
            _prove_group(group, matches[0])
            proved += 1

    # If nothing was compared, nothing is proved.
    if not proved:
        complaint = "no kernel group of the arch proof is among what CMake compiles"
        raise ProofError(complaint)
    return f"{proved} kernel groups are compiled for the archs that were proved"


def _prove_group(group: Group, source: CudaSource) -> None:
    codes = {code for arch in group.archs for code in parse_arch(arch).codes}
    if codes != source.names:
        raise ProofError(
            f"{source.source} is compiled for {_joined(source.names)}, and "
            f"{group.where} says {_joined(codes)}",
            why="CMake was given another arch list, or other files than those that were proved",
            hint="run again with --fresh",
        )


def _joined(names: Iterable[str]) -> str:
    return " and ".join(sorted(names))


def prove_compiled(
    sources: Sequence[CudaSource],
    binaries: Binaries,
    target: Target,
) -> Texts:
    """Prove that each library holds the code of its sources; return a sentence for each library.

    Raises ProofError if a library is not in the wheel or lacks code.
    """
    libraries = {
        PurePosixPath(binary.name).name.partition(".")[0]: binary for binary in binaries
    }
    by_library = defaultdict(list)
    for source in sources:
        by_library[source.library].append(source)

    proofs = []
    for name, compiled in sorted(by_library.items()):
        if name not in libraries:
            raise ProofError(
                f"{name} was compiled, and is not in the wheel",
                why="it was linked, and not installed",
                hint="run again with --fresh",
            )
        _prove_linked(compiled, libraries[name])
        exact = sum(source.load(target) is Load.EXACT for source in compiled)
        proofs.append(
            f"{libraries[name].name}: {exact} of {len(compiled)} CUDA sources "
            f"are exact for {target.title}"
        )
    return tuple(proofs)


def _prove_linked(sources: Sequence[CudaSource], binary: Binary) -> None:
    expected = Counter(source.names for source in sources)
    # Compared by name, since an Arch from a fat binary also says whether PTX is beside it.
    linked = Counter(
        frozenset(entry.name for entry in group) for group in binary.fat_binaries
    )
    for names, count in (expected - linked).items():
        example = next(source.source for source in sources if source.names == names)
        raise ProofError(
            f"{binary.name} lacks {count} of {expected[names]} fat binaries with "
            f"{_joined(names)}, what {example} for example was compiled to",
            why="objects of another build were linked",
            hint="run again with --fresh",
        )
