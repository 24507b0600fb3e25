"""Make libraries native: replace PTX that the device would compile by machine code for it.

inspect → jobs → assemble, in parallel → relink → inspect again

The PTX that a device would compile at first use can be listed too: of a library, a wheel or an
environment.
"""

import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from fnmatch import fnmatchcase
from importlib import metadata
from io import BufferedIOBase
from itertools import chain
from pathlib import Path

from packaging.utils import canonicalize_name

from patchkit.durable.paths import is_plain
from patchkit.errors import (
    BuildError,
    PatchkitError,
    ProofError,
    SourceError,
    UsageError,
)
from patchkit.fatbin import CONTAINER, CodeEntry, Entries
from patchkit.frozen import Texts, frozen
from patchkit.recipes.vllm.build import KnownSource
from patchkit.source.fetch import Progress
from patchkit.source.tree import SourceTree
from patchkit.target import Load, Target
from patchkit.wheel.device.inspect import (
    Binaries,
    Binary,
    best_reach,
    inspect_file,
    inspect_wheel,
    jit_entries,
)
from patchkit.wheel.device.libraries import Judgements, cuda_major, judge_libraries
from patchkit.wheel.file.library_rules import library_rules
from patchkit.wheel.file.wheelfile import Facts, WheelFile
from patchkit.wheel.native.assemble import Assembler, Job, Task
from patchkit.wheel.native.relink import replace_device_code
from patchkit.wheel.native.schedule import assemble_all


@frozen
class NativeLibrary:
    """A library with PTX that the device would compile at first use.

    ``path`` is the new file, None if none could be made. ``ptx`` has the SHA-256 of each assembled
    PTX, in the order of the file. ``refused`` has a reason for each fat binary that the device
    still compiles.
    """

    name: str
    path: Path | None
    ptx: Texts
    refused: Texts


NativeLibraries = Sequence[NativeLibrary]


def make_native(
    files: Mapping[str, Path],
    target: Target,
    folder: Path,
    assembler: Assembler,
    progress: Progress,
) -> NativeLibraries:
    """Write libraries (name → file) anew, with machine code for PTX that the device would compile.

    A library without such PTX is not written. The new files come into ``folder``. PTX stays if it
    cannot be assembled. Raises SourceError for a file that is no library, ProofError if a result is
    not what it has to be, StorageError.
    """
    binaries = {name: inspect_file(path) for name, path in files.items()}
    # PTX without a suffix uses nothing that only some devices have: its machine code needs no "a".
    number = "{}{}".format(*target.capability)
    jobs: dict[str, list[Job]] = defaultdict(list)
    for name, binary in binaries.items():
        for entry in jit_entries(binary, target):
            arch = f"{number}{entry.arch.suffix}"
            job = Job(name=name, path=files[name], entry=entry, arch=arch)
            jobs[name].append(job)

    results = assemble_all(assembler, list(chain(*jobs.values())), progress)

    libraries: list[NativeLibrary] = []
    for name, of_library in jobs.items():
        dest = folder / f"{len(libraries)}-{files[name].name}"
        codes = {job.entry.container: results[job] for job in of_library}
        library = _make_library(name, files[name], dest, binaries[name], codes, target)
        libraries.append(library)
    return tuple(libraries)


def _make_library(
    name: str,
    source: Path,
    dest: Path,
    binary: Binary,
    results: Mapping[int, Task | PatchkitError],
    target: Target,
) -> NativeLibrary:
    """Write one library with its new machine code to ``dest``.

    ``results`` is offset of a fat binary → its task, or the error. If the library cannot be
    written, the result has the reason in ``refused``, and no ``path``.
    """
    codes: dict[int, Task] = {}
    refused = []
    for place, result in results.items():
        if isinstance(result, Task):
            codes[place] = result
        else:
            refused.append(result.what)

    try:
        if codes:
            _write_library(source, dest, binary, codes, target)
    except BuildError as error:  # of the whole library
        codes = {}
        refused = [error.what]

    return NativeLibrary(
        name=name,
        path=dest if codes else None,
        ptx=tuple(codes[place].ptx for place in sorted(codes)),
        refused=tuple(refused),
    )


def native_facts(libraries: NativeLibraries, assembler: Assembler) -> Facts:
    """Return the facts that a wheel records about its native libraries, by library."""
    return {
        "ptxas": assembler.version,
        "assembled": {
            library.name: list(library.ptx) for library in libraries if library.path
        },
        "compiled_at_first_use": {
            library.name: len(library.refused)
            for library in libraries
            if library.refused
        },
    }


def _write_library(
    source: Path,
    dest: Path,
    binary: Binary,
    codes: Mapping[int, Task],
    target: Target,
) -> None:
    with source.open("rb") as stream:
        pieces = {
            group[0].container: _new_pieces(stream, group, codes, target)
            for group in binary.fat_binaries
        }
    replace_device_code(source, dest, pieces)

    after = inspect_file(dest)
    groups = zip(binary.fat_binaries, after.fat_binaries, strict=True)
    for old, new in groups:
        place = old[0].container
        least = Load.FAMILY if place in codes else best_reach(old, target)
        load = best_reach(new, target)
        if load < least:
            raise ProofError(
                f"{binary.name}: the device code at byte {place} became "
                f"{load} for {target.title}",
                why="it was written wrongly",
                hint="please report this with the library",
            )

    # All that the loader reads must be unchanged; only sections may have moved.
    if replace(after.library, sections=()) != replace(binary.library, sections=()):
        raise ProofError(f"{binary.name}: the loader would read another library of it")


def _new_pieces(
    stream: BufferedIOBase,
    group: Sequence[CodeEntry],
    codes: Mapping[int, Task],
    target: Target,
) -> Sequence[bytes]:
    """Return the bytes of a new fat binary, in pieces: the assembled one, or the old one reduced.

    If the device loads machine code of the old one, its other entries are left out.
    """
    place = group[0].container
    if place in codes:
        return [codes[place].place.read_bytes()]

    def read_bytes(offset: int, size: int) -> bytes:
        stream.seek(offset)
        return stream.read(size)

    loaded = [entry for entry in group if entry.kind == "sass" and entry.reach(target)]
    entries = loaded or group
    head = read_bytes(place, CONTAINER.size)
    magic, version, header, _ = CONTAINER.unpack(head)
    size = sum(entry.size for entry in entries)
    return [
        CONTAINER.pack(magic, version, header, size),
        read_bytes(place + CONTAINER.size, header - CONTAINER.size),
        *(read_bytes(entry.offset, entry.size) for entry in entries),
    ]


@frozen
class Kernels:
    """The libraries of a wheel, each judged on the device."""

    binaries: Binaries
    judged: Judgements

    @property
    def cuda(self) -> str:
        """Return the major version of the CUDA that the libraries are linked with.

        Return "" for libraries that no table knows, if they need none or several.
        """
        majors = {str(major) for binary in self.binaries for major in binary.cuda}
        if self.judged or len(majors) == 1:
            return cuda_major(self.binaries)
        return ""


def read_kernels(wheel: WheelFile, target: Target) -> Kernels:
    """Read the libraries of a wheel. Raises SourceError for a damaged one."""
    binaries = inspect_wheel(wheel)
    judged = judge_libraries(binaries, target, wheel.name)
    return Kernels(binaries=binaries, judged=judged)


@frozen
class NativeParts:
    """The libraries of a wheel that were made native; none for a wheel that stays as it is."""

    libraries: NativeLibraries = ()
    facts: Facts = field(default_factory=dict)

    @property
    def members(self) -> dict[str, bytes]:
        """The new libraries, by their path in the wheel."""
        return {
            library.name: library.path.read_bytes()
            for library in self.libraries
            if library.path
        }

    @property
    def count(self) -> int:
        """The number of fat binaries that were assembled."""
        return sum(len(library.ptx) for library in self.libraries)

    @property
    def refused_notes(self) -> list[str]:
        """Sentences about the PTX that the device still compiles."""
        return [
            f"{reason}; it is compiled at first use"
            for library in self.libraries
            for reason in library.refused
        ]


def native_parts(
    wheel: WheelFile,
    kernels: Kernels,
    target: Target,
    folder: Path,
    assembler: Assembler,
    progress: Progress,
) -> NativeParts:
    """Assemble the PTX in a wheel's libraries that the device would compile, into ``folder``.

    Raises the errors of ``make_native``.
    """
    names = [
        binary.name
        for binary in kernels.binaries
        if jit_entries(binary, target)
        and not library_rules().is_closed(wheel.name.project, binary.name)
    ]
    # Each in a folder of its own, since members may have the same file name.
    files = {
        name: wheel.copy_member(name, folder / "old" / str(number) / Path(name).name)
        for number, name in enumerate(names)
    }
    made = make_native(files, target, folder, assembler, progress)
    return NativeParts(libraries=made, facts=native_facts(made, assembler))


def members_of(known: KnownSource, paths: Iterable[str]) -> Texts:
    """Return the paths of a wheel that belong to a source, in their order."""
    return tuple(
        path
        for path in paths
        if any(fnmatchcase(path, part) for part in known.installed)
    )


@frozen
class DeviceLibrary:
    """A library with device code; ``name`` is its path in a wheel or an environment.

    ``project`` is the project that has the library, "" for a bare file. ``entries`` is the PTX that
    the device would compile. A ``closed`` library is NVIDIA's own, and is never rewritten.
    """

    project: str
    name: str
    fat_binaries: int
    entries: Entries
    closed: bool

    @property
    def writable(self) -> bool:
        return bool(self.entries) and not self.closed


def list_libraries(path: Path, target: Target) -> tuple[DeviceLibrary, ...]:
    """List the libraries with device code at ``path``: a wheel, a library, or an environment.

    Raises UsageError for any other path, SourceError for a damaged file.
    """
    if path.is_dir():
        return tuple(list_installed(find_site(path), target))

    if path.suffix == ".whl":
        with WheelFile(path) as wheel:
            name = wheel.name
            binaries = inspect_wheel(wheel)
        return tuple(_list_binaries(binaries, target, name.project))

    return tuple(_list_binaries([inspect_file(path)], target, ""))


def first_use_entries(binaries: Binaries, target: Target) -> Entries:
    """Return the PTX in libraries that the device would compile at first use."""
    return tuple(entry for binary in binaries for entry in jit_entries(binary, target))


def find_site(path: Path) -> Path:
    """Return the site-packages folder of ``path``: an environment, this folder, or a package in it.

    Raises UsageError if there is none, or more than one.
    """
    for folder in (path, *path.parents[:1]):
        if any(folder.glob("*.dist-info")):
            return folder

    sites = sorted(path.glob("lib/python3*/site-packages"))
    if len(sites) != 1:
        raise UsageError(
            f"{path}: {len(sites)} folders lib/python3*/site-packages, expected 1",
            why="it is no environment, or one for several Pythons",
            hint="name the site-packages folder",
        )
    return sites[0]


def list_installed(
    site: Path,
    target: Target,
    only: str = "",
) -> Iterator[DeviceLibrary]:
    """Yield the libraries with device code of all installed packages, or of the project ``only``.

    Damaged files are passed over, and packages whose RECORD cannot be read.
    """
    for home in sorted(site.glob("*.dist-info")):
        project = canonicalize_name(home.name.partition("-")[0])
        if only not in ("", project):
            continue

        package = metadata.Distribution.at(home)
        try:
            # Not ``package.files``: from Python 3.12 on it fails at a name that is too long.
            record = package.read_text("RECORD") or ""
            rows = [row for row in csv.reader(record.splitlines()) if row]
        except (ValueError, csv.Error):
            continue  # neither does pip read it

        for path, *_digest in rows:
            if not _is_library(site, path):
                continue

            try:
                binary = replace(inspect_file(site / path), name=path)
            except SourceError:
                continue  # a linker's script, or damaged: the loader does not take it either
            yield from _list_binaries([binary], target, project)


def _is_library(site: Path, path: str) -> bool:
    # Not paths that lead out of the environment, nor originals in .patchkit, which nothing loads.
    is_aside = not is_plain(path) or ".patchkit/" in path
    return ".so" in Path(path).suffixes and not is_aside and (site / path).is_file()


def package_libraries(tree: SourceTree, target: Target) -> list[str]:
    """Return the names of the libraries of an installed package that have PTX to assemble.

    Raises UsageError for a source tree.
    """
    if tree.kind != "installed":
        raise UsageError(
            f"{tree.root}: a source tree holds no libraries yet",
            hint="build it, or name an installed vLLM: SITE-PACKAGES/vllm",
        )

    libraries = list_installed(tree.root, target, tree.project)
    return [library.name for library in libraries if library.writable]


def _list_binaries(
    binaries: Binaries,
    target: Target,
    project: str,
) -> Iterator[DeviceLibrary]:
    for binary in binaries:
        if binary.live:
            yield DeviceLibrary(
                project=project,
                name=binary.name,
                fat_binaries=len(binary.fat_binaries),
                entries=jit_entries(binary, target),
                closed=library_rules().is_closed(project, binary.name),
            )
