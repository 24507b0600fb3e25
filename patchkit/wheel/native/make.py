"""Make libraries native: machine code for the device in the place of PTX that it would compile.

inspect → jobs → assemble, in parallel → relink → inspect again
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from patchkit.errors import BuildError, PatchkitError, ProofError, SourceError
from patchkit.source.fetch import Progress
from patchkit.target import Load, Target
from patchkit.unreached import NOTHING_READ, Dispatch, Unreached
from patchkit.wheel.device.fatbin import CONTAINER
from patchkit.wheel.device.first_use import jit_entries
from patchkit.wheel.device.inspect import Binary, best_load, fat_binaries, inspect_file
from patchkit.wheel.native.assemble import Assembled, Assembler, Job
from patchkit.wheel.native.ptx import read_ptx
from patchkit.wheel.native.relink import replace_device_code
from patchkit.wheel.native.schedule import assemble_all


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLibrary:
    """A library that the device would compile something of at first use.

    ``path`` is the new file, None if none could be made. ``ptx`` are the SHA-256 of what was
    assembled, in the order of the file; ``refused`` says of each fat binary that the device still
    compiles, why. ``unreached`` stay as they are, since nothing calls them on the device.
    """

    name: str
    path: Path | None
    ptx: tuple[str, ...]
    refused: tuple[str, ...]
    unreached: tuple[Unreached, ...] = ()

    @property
    def refused_notes(self) -> list[str]:
        """Say which fat binaries the device still compiles, and why."""
        return [f"{reason}; it is compiled at first use" for reason in self.refused]


def make_native(
    files: Mapping[str, Path],
    target: Target,
    folder: Path,
    assembler: Assembler,
    progress: Progress,
    dispatch: Dispatch = NOTHING_READ,
) -> tuple[NativeLibrary, ...]:
    """Write those of some libraries (name → file) anew that hold what the device would compile.

    They come into ``folder``. What cannot be assembled stays as it is, and what ``dispatch`` never
    calls. Raises SourceError for a file that is no library, ProofError if a result is not what it
    has to be, StorageError.
    """
    binaries = {name: inspect_file(path)[0] for name, path in files.items()}
    # Nothing in PTX without a suffix needs more than every device has: no "a" for it.
    number = "{}{}".format(*target.capability)
    jobs = [
        Job(name=name, path=files[name], entry=entry, arch=number + entry.arch.suffix)
        for name, binary in binaries.items()
        for entry in jit_entries(binary, target)
    ]
    unreached: dict[str, list[Unreached]] = defaultdict(list)
    wanted: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        if row := _never_called(job, dispatch):
            unreached[job.name].append(row)
        else:
            wanted[job.name].append(job)

    results = assemble_all(
        assembler, [job for of in wanted.values() for job in of], progress
    )
    made: list[NativeLibrary] = []
    for name in dict.fromkeys(job.name for job in jobs):
        place = folder / f"{len(made)}-{files[name].name}"
        codes = {job.entry.container: results[job] for job in wanted[name]}
        library = _make_library(name, files[name], place, binaries[name], codes, target)
        made.append(replace(library, unreached=tuple(unreached[name])))
    return tuple(made)


def _never_called(job: Job, dispatch: Dispatch) -> Unreached | None:
    if not dispatch.knows(job.name):
        return None
    with job.path.open("rb") as stream:
        try:
            kernels = read_ptx(stream, job.entry, job.name).kernels
        except SourceError:
            return None  # the assembler says what is wrong with it
    return dispatch.never_calls(job.name, kernels)


def _make_library(
    name: str,
    source: Path,
    dest: Path,
    binary: Binary,
    results: Mapping[int, Assembled | PatchkitError],
    target: Target,
) -> NativeLibrary:
    """Write one library with what could be assembled of it, by the place of its fat binaries."""
    codes = {at: code for at, code in results.items() if isinstance(code, Assembled)}
    refused = tuple(
        str(error.what)
        for error in results.values()
        if isinstance(error, PatchkitError)
    )
    try:
        if codes:
            _write_library(source, dest, binary, codes, target)
    except BuildError as error:  # of the whole library
        codes, refused = {}, (error.what,)
    return NativeLibrary(
        name=name,
        path=dest if codes else None,
        ptx=tuple(codes[at].ptx for at in sorted(codes)),
        refused=refused,
    )


def native_facts(
    libraries: Sequence[NativeLibrary],
    assembler: Assembler,
    dropped: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what a wheel says of its native parts: of each library the SHA-256 of all its PTX."""
    unreached = {each.name: [row.name for row in each.unreached] for each in libraries}
    return {
        "ptxas": assembler.version,
        "assembled": {each.name: list(each.ptx) for each in libraries if each.path},
        "compiled_at_first_use": {
            each.name: len(each.refused) for each in libraries if each.refused
        },
        "never_called": {name: rows for name, rows in unreached.items() if rows},
        "left_out": list(dropped),
    }


def _write_library(
    source: Path,
    dest: Path,
    binary: Binary,
    codes: Mapping[int, Assembled],
    target: Target,
) -> None:
    replace_device_code(
        source, dest, dict(_new_fat_binaries(source, binary, codes, target))
    )
    (after,) = inspect_file(dest)
    pairs = zip(fat_binaries(binary.live), fat_binaries(after.live), strict=True)
    for old, new in pairs:
        least = Load.FAMILY if old[0].container in codes else best_load(old, target)
        if best_load(new, target) < least:
            raise ProofError(
                f"{binary.name}: the device code at byte {old[0].container} became "
                f"{best_load(new, target)} for {target.title}",
                why="it was written wrongly",
                hint="please report this with the library",
            )
    # What the loader reads is as it was; sections lie elsewhere.
    if replace(after.library, sections=()) != replace(binary.library, sections=()):
        raise ProofError(f"{binary.name}: the loader would read another library of it")


def _new_fat_binaries(
    source: Path, binary: Binary, codes: Mapping[int, Assembled], target: Target
) -> Iterator[tuple[int, list[bytes]]]:
    """Yield each fat binary by its offset, in pieces: assembled, or as it was.

    Machine code for other devices leaves, and PTX beside machine code that the device loads.
    """
    with source.open("rb") as stream:

        def read_bytes(offset: int, size: int) -> bytes:
            stream.seek(offset)
            return stream.read(size)

        for group in fat_binaries(binary.live):
            at = group[0].container
            if at in codes:
                yield at, [codes[at].path.read_bytes()]
                continue
            loaded = [
                entry for entry in group if entry.kind == "sass" and entry.reach(target)
            ]
            kept = loaded or group
            magic, version, header, _ = CONTAINER.unpack(read_bytes(at, CONTAINER.size))
            fields = CONTAINER.pack(
                magic, version, header, sum(entry.size for entry in kept)
            )
            rest = read_bytes(at + CONTAINER.size, header - CONTAINER.size)
            yield (
                at,
                [
                    fields,
                    rest,
                    *(read_bytes(entry.offset, entry.size) for entry in kept),
                ],
            )
