"""Make libraries native: replace PTX that the device would compile by machine code for it.

inspect → jobs → assemble, in parallel → relink → inspect again
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BufferedIOBase
from itertools import chain
from pathlib import Path

from patchkit.errors import BuildError, PatchkitError, ProofError
from patchkit.fatbin import CONTAINER, CodeEntry
from patchkit.frozen import Texts, frozen
from patchkit.source.fetch import Progress
from patchkit.target import Load, Target
from patchkit.wheel.device.inspect import Binary, best_reach, inspect_file, jit_entries
from patchkit.wheel.file.wheelfile import Facts
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
