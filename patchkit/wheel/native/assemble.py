"""Make machine code of PTX with the locked toolkit's ptxas: what the driver does at first use.

A result depends on the PTX, the options and the toolkit alone, and is kept in the cache under their
digest: whatever was killed goes on, and a library of another release costs what is new in it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from patchkit.digests import digest
from patchkit.elf import Section, parse_library
from patchkit.errors import (
    BuildError,
    HostError,
    PatchkitError,
    SourceError,
    StorageError,
    translated,
)
from patchkit.follow import Follow
from patchkit.source.fetch import Progress, cache_dir
from patchkit.target import toolkits
from patchkit.units import BYTES_PER_MIB
from patchkit.wheel.build.machine import available_memory
from patchkit.wheel.build.toolchain import COMPILER, locked_toolkit
from patchkit.wheel.device.fatbin import CodeEntry, read_entries
from patchkit.wheel.native.ptx import Ptx, read_ptx

# ptxas of 13.0 with the largest modules of FlashAttention 2: 172 MiB for 1.7 MB, 761 for 19.7 MB;
# 1,687 for the 33.7 MB of one of vLLM.
_LEAST_MEMORY, _MEMORY_PER_BYTE = 128 * BYTES_PER_MIB, 50
_MAKING, _STALE = ".making-", 86400  # seconds; no PTX takes that long
_SHARE = 0.8  # of the memory that is available
# Options that change the code and nothing else. The words come from a file that somebody else made:
# others could read or write files.
_SWITCHES = re.compile(r"-O[0-3]|-v|-w|--?(verbose|warn[a-z-]*|generate-line-info|lineinfo)")
_VALUES = re.compile(r"--?(maxrregcount|dlcm|dscm|def-(load|store)-cache|fmad|opt-level)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A fat binary to assemble: the ``entry`` with its PTX, in the file ``path``.

    ``name`` is that of the library, for people; ``arch`` is ``121``, or ``121a`` of PTX for
    ``compute_121a``: machine code has the suffix of its PTX, since nothing in PTX without one needs
    more than every device has.
    """

    name: str
    path: Path
    entry: CodeEntry
    arch: str

    @property
    def where(self) -> str:
        return f"{self.name}: the device code at byte {self.entry.container}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """Machine code: ``path`` is a file that holds one fat binary; ``ptx`` is the PTX's sha256."""

    path: Path
    ptx: str


class Assembler:
    """The ptxas and fatbinary of the locked toolkits, for this machine.

    PTX goes to the oldest that reads it: that of the CUDA which compiled it.
    """

    def __init__(self, *, offline: bool = False, progress: Progress | None = None) -> None:
        """Unpack the oldest toolkit's compiler, once. Raises what a fetch raises."""
        here = platform.machine()
        self._unpack = partial(locked_toolkit, here, here, offline=offline, only=COMPILER)
        self._unpack(toolkits()[0].cuda, progress=progress)
        self._used, self.stopped = set[str](), threading.Event()
        self.cache = cache_dir() / "native"
        with translated(at=self.cache):
            self.cache.mkdir(parents=True, exist_ok=True)
        for left in self.cache.glob(f"{_MAKING}*"):  # by a run that was killed
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > _STALE:
                    shutil.rmtree(left, ignore_errors=True)

    @property
    def version(self) -> str:
        """The version of ptxas, or all that were used."""
        return ", ".join(sorted(self._used)) or toolkits()[0].nvcc

    def assemble(self, job: Job) -> Assembled:
        """Return the machine code of one fat binary, from the cache or made now.

        Raises SourceError for damaged PTX, BuildError if ptxas does not take it.
        """
        row = next((it for it in toolkits() if job.entry.version <= it.ptx), toolkits()[-1])
        if job.entry.version > row.ptx:
            newer = ".".join(map(str, job.entry.version))
            raise BuildError(f"{job.where} is PTX {newer}; ptxas {row.nvcc} is older")
        with job.path.open("rb") as stream:
            ptx = read_ptx(stream, job.entry, job.name)
        options, left = [], list(ptx.options)
        while left:
            word = left.pop(0)
            if _VALUES.fullmatch(word) and left and re.fullmatch(r"\w+", left[0]):
                options.append(f"{word}={left.pop(0)}")
            elif _SWITCHES.fullmatch(word):
                options.append(word)
            else:
                raise BuildError(f"it was compiled with {word}, which patchkit does not pass on")
        key = digest("\0".join((digest(ptx.text), row.nvcc, job.arch, *options)))
        place = self.cache / f"{key}.fatbin"
        if not (place.is_file() and _holds(place, job.arch)):
            self._make(ptx, options, job, place, self._unpack(row.cuda, progress=None) / "bin")
        self._used.add(row.nvcc)
        return Assembled(path=place, ptx=digest(ptx.text))

    def _make(self, ptx: Ptx, options: Sequence[str], job: Job, place: Path, tools: Path) -> None:
        with (
            translated(at=self.cache),
            tempfile.TemporaryDirectory(prefix=_MAKING, dir=self.cache) as made,
        ):
            folder = Path(made)
            (folder / "x.ptx").write_bytes(ptx.text)
            words = (f"-arch=sm_{job.arch}", *options, "x.ptx", "-o", "x.cubin")
            self._run(tools / "ptxas", *words, folder=folder, where=job.where)
            with (folder / "x.cubin").open("rb") as stream:
                sections = {section.name for section in parse_library(stream, job.where).sections}
            if lost := sorted(k for k in ptx.kernels if f".text.{k}" not in sections):
                raise BuildError(f"{job.where}: ptxas made no code of the kernel {lost[0]}")
            # As nvcc calls it. Compressed, as upstream's PTX was: a seventh of the size.
            image = f"--image3=kind=elf,sm={job.arch},file=x.cubin"
            words = ("-64", "--create=x.fatbin", image, "--compress-all")
            self._run(tools / "fatbinary", *words, folder=folder, where=job.where)
            if not _holds(folder / "x.fatbin", job.arch):
                raise BuildError(f"{job.where}: fatbinary made no code for sm_{job.arch}")
            with (folder / "x.fatbin").open("rb") as stream:
                os.fsync(stream.fileno())
            (folder / "x.fatbin").rename(place)

    def _run(self, tool: Path, *words: str, folder: Path, where: str) -> None:
        """Run a tool. Raises BuildError if it refuses its input, HostError or StorageError else."""
        with Follow(tool, *words, cwd=folder) as running:
            for _line in running:
                if self.stopped.is_set():
                    raise HostError(f"{where}: {tool.name} was stopped")
        done = running.done
        if done.status is None or done.status < 0:
            hint = "free some memory, and run again: what is assembled already is kept"
            raise done.error(
                HostError, why=f"{where}: it was killed, or cannot run here", hint=hint
            )
        if done.trouble and shutil.disk_usage(folder).free < BYTES_PER_MIB:
            raise StorageError(
                f"{folder.parent}: the disk is full", hint="free some space (0.1 GB)"
            )
        if done.trouble:
            raise done.error(BuildError, why=where)


def assemble_all(
    assembler: Assembler, jobs: Sequence[Job], progress: Callable[[int, int], None]
) -> dict[Job, Assembled | PatchkitError]:
    """Assemble on all cores, the longest first, and return what became of each.

    No more of them run at once than there is memory for. An error says why one has no result.
    """
    memory = _Memory(int(available_memory() * _SHARE))
    total, done = sum(job.entry.plain for job in jobs), 0
    results: dict[Job, Assembled | PatchkitError] = {}

    def assemble(job: Job) -> Assembled | PatchkitError:
        try:
            with memory.held(_LEAST_MEMORY + _MEMORY_PER_BYTE * job.entry.plain):
                return assembler.assemble(job)
        except (SourceError, BuildError) as error:
            return error

    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        ordered = sorted(jobs, key=lambda job: -job.entry.plain)
        futures = {pool.submit(assemble, job): job for job in ordered}
        progress(0, total)
        for future in as_completed(futures):
            results[futures[future]] = future.result()
            done += futures[future].entry.plain
            progress(done, total)
    except BaseException:
        assembler.stopped.set()  # else an interrupt waits for minutes
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return results


class _Memory:
    """Lets threads wait until there is memory for what they do; one of them always goes on."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def held(self, size: int) -> Iterator[None]:
        size = min(size, self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


def _holds(fatbin: Path, arch: str) -> bool:
    """Check whether a file is one fat binary with machine code for the arch, and nothing else."""
    with fatbin.open("rb") as stream:
        whole = Section(".nv_fatbin", 0, fatbin.stat().st_size)
        try:
            names = [entry.name for entry in read_entries(stream, [whole], str(fatbin))]
        except SourceError:
            return False  # cut off by a power cut
    return names == [f"sm_{arch}"]
