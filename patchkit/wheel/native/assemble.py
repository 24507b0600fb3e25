"""Assemble PTX into machine code with the locked toolkit's ptxas, as the driver does at first use.

A result depends only on the PTX, the options and the toolkit, and is kept in the cache under a
digest of these. Therefore the next run continues a killed one, and only new PTX of another release
is assembled. PTX that differs only in the name of its translation unit is assembled once.
"""

import os
import platform
import re
import shutil
import struct
import tempfile
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import lz4.block  # type: ignore[import-untyped]
import zstandard

from patchkit.digests import digest
from patchkit.elf import Section, damaged
from patchkit.errors import BuildError, HostError, SourceError, StorageError, translated
from patchkit.fatbin import ENTRY, CodeEntry, read_entries
from patchkit.follow import Follow, Resources
from patchkit.frozen import Texts, frozen
from patchkit.source.fetch import Progress, cache_dir
from patchkit.target import Toolkit, ptxas_figures, toolkits
from patchkit.units import BYTES_PER_MIB
from patchkit.wheel.build.machine import COMPILER, locked_toolkit, remove_stale

_MAKING = ".making-"
# Let glibc's malloc use huge pages: 16 ptxas at once took 14 % less processor time, and their
# results were the same to the byte.
_TUNABLES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_FORMAT = 4  # of a result; to be raised if the same PTX gives other bytes
# The options that are passed on: they change only the code. They come from a file that somebody
# else made, and other options could read or write files.
_SWITCHES = r"-O[0-3]|-v|-w|--?(verbose|warn[a-z-]*|generate-line-info|lineinfo)"
_VALUES = r"--?(maxrregcount|dlcm|dscm|def-(load|store)-cache|fmad|opt-level)"


_PAIR = struct.Struct("<II")
_MOST_OPTIONS = 4096  # bytes; nvcc leaves a few words
_WINDOW = 1 << 27  # bytes; the largest window of zstd's own program


@frozen
class Ptx:
    """A PTX module: its ``text``, and the ``options`` for ptxas that its compiler recorded."""

    text: bytes
    options: Texts


@frozen
class Job:
    """A fat binary to assemble: the ``entry`` with its PTX, in the file ``path``.

    ``name`` is the library's name in messages. ``arch`` is the arch of the machine code: ``121``,
    or ``121a`` if the PTX is for ``compute_121a``. PTX without a suffix uses nothing that only some
    devices have, so its machine code needs no suffix.
    """

    name: str
    path: Path
    entry: CodeEntry
    arch: str

    @property
    def where(self) -> str:
        return f"{self.name}: the device code at byte {self.entry.container}"

    @property
    def size(self) -> int:
        """Return the size of the PTX in bytes, decompressed."""
        return self.entry.unpacked_size

    @property
    def is_split(self) -> bool:
        """Return whether ptxas uses several threads for this PTX."""
        return self.size >= ptxas_figures().split_from

    @property
    def resources(self) -> Resources:
        """Return the limits of one ptxas, which depend only on the size of the PTX."""
        figures = ptxas_figures()
        memory, memory_more = figures.memory
        if self.is_split:
            memory, memory_more = figures.split_memory
        seconds, seconds_more = figures.processor
        written, written_more = figures.written

        return Resources(
            memory=memory * BYTES_PER_MIB + memory_more * self.size,
            processor=seconds + seconds_more * self.size // 10**6,
            written=written * BYTES_PER_MIB + written_more * self.size,
        )

    def read_ptx(self) -> Ptx:
        """Read the PTX of the entry and decompress it. Raises SourceError if it is damaged."""
        entry = self.entry

        def check_that(holds: bool, complaint: str) -> None:
            if not holds:
                raise damaged(
                    self.name, f"the device code at byte {entry.offset}: {complaint}"
                )

        with self.path.open("rb") as stream:
            stream.seek(entry.offset)
            data = stream.read(entry.size)
        check_that(
            entry.kind == "ptx" and len(data) == entry.size,
            "it is no PTX, or cut off",
        )
        _, _, header, size, packed, pair, *_ = ENTRY.unpack_from(data)
        check_that(packed <= size, "its sizes contradict each other")
        payload = data[header : header + packed]
        try:
            match entry.compression:
                case "zstd":
                    # zstandard would allocate a size in the frame in spite of max_output_size.
                    frame = zstandard.get_frame_parameters(payload).content_size
                    sizes = (entry.unpacked_size, zstandard.CONTENTSIZE_UNKNOWN)
                    check_that(frame in sizes, "its sizes contradict each other")
                    reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
                    text = reader.decompress(
                        payload, max_output_size=entry.unpacked_size
                    )
                case "lz4":
                    text = lz4.block.decompress(
                        payload, uncompressed_size=entry.unpacked_size
                    )
                case _:
                    text = data[header:]
        except (zstandard.ZstdError, lz4.block.LZ4BlockError) as error:
            raise damaged(
                self.name, f"the PTX at byte {entry.offset}: {error}"
            ) from None
        check_that(len(text) == entry.unpacked_size, "its sizes contradict each other")

        # The text ends with NULs, which ptxas does not accept.
        text = text.rstrip(b"\0")
        check_that(
            b".target" in text and b"\0" not in text, "it is not the text of PTX"
        )

        options = b""
        if pair + _PAIR.size <= header:
            place, length = _PAIR.unpack_from(data, pair)
            check_that(place + length <= header, "its options end behind its header")
            check_that(length <= _MOST_OPTIONS, f"it has {length} bytes of options")
            options = data[place : place + length]
        # -maxrregcount=32 is also written as two words.
        words = options.decode(errors="replace").replace("=", " ").split()
        return Ptx(text=text, options=tuple(words))


@frozen
class Task:
    """A job whose PTX was read; its result will be a fat binary in the file ``place``.

    ``ptx`` is the sha256 of the PTX. ``words`` are the options for the ptxas of ``toolkit``.
    """

    job: Job
    place: Path
    ptx: str
    words: Texts
    toolkit: Toolkit

    @property
    def is_done(self) -> bool:
        return self.place.is_file() and _holds(self.place, self.job.arch)


class Assembler:
    """Assemble PTX with ptxas and fatbinary of the locked toolkits, on this machine.

    PTX is assembled by the oldest toolkit that reads it, which has the CUDA that compiled the PTX.
    """

    def __init__(
        self,
        *,
        offline: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Unpack the oldest toolkit's compiler into the cache. Raises the errors of a fetch."""
        host = platform.machine()
        self._unpack = partial(
            locked_toolkit,
            host,
            host,
            offline=offline,
            only=COMPILER,
        )
        self._unpack(toolkits()[0].cuda, progress=progress)
        self._used: set[str] = set()
        self.stopped = threading.Event()

        self.cache = cache_dir() / "native"
        with translated(at=self.cache):
            self.cache.mkdir(parents=True, exist_ok=True)
        for folder in self.cache.glob(f"{_MAKING}*"):  # by a run that was killed
            remove_stale(folder)

    @property
    def version(self) -> str:
        """Return the versions of ptxas that the PTX needs, or that of the oldest toolkit."""
        return ", ".join(sorted(self._used)) or toolkits()[0].nvcc

    def plan(self, job: Job) -> Task:
        """Read the PTX of a job and return its task.

        Raises SourceError if the PTX is damaged, BuildError if no toolkit reads it or an option of
        its compiler is not passed on.
        """
        toolkit = _oldest_toolkit(job)
        ptx = job.read_ptx()
        words = [f"-arch=sm_{job.arch}", *_checked_options(ptx.options)]
        if job.is_split:
            words.append(f"--split-compile={ptxas_figures().split}")

        recipe = "\0".join([str(_FORMAT), toolkit.nvcc, *words])
        sha256 = digest(ptx.text)
        name = digest(f"{sha256}\0{recipe}")
        self._used.add(toolkit.nvcc)
        return Task(
            job=job,
            place=self.cache / f"{name}.fatbin",
            ptx=sha256,
            words=tuple(words),
            toolkit=toolkit,
        )

    def make(self, task: Task) -> None:
        """Make the result of a task.

        Raises BuildError if ptxas refuses the PTX, HostError or StorageError if it cannot run.
        """
        job = task.job
        tools = self._unpack(task.toolkit.cuda, progress=None) / "bin"
        with (
            translated(at=self.cache),
            tempfile.TemporaryDirectory(prefix=_MAKING, dir=self.cache) as scratch,
        ):
            folder = Path(scratch)
            (folder / "x.ptx").write_bytes(job.read_ptx().text)
            words = (*task.words, "x.ptx", "-o", "x.cubin")
            self._run(tools / "ptxas", *words, folder=folder, job=job)
            self._pack(task, tools, folder)

    def _pack(self, task: Task, tools: Path, folder: Path) -> None:
        """Pack the machine code ``x.cubin`` in ``folder`` into a fat binary, the task's result.

        Raises BuildError if the result holds other code.
        """
        job = task.job
        # The options that nvcc uses. Compressed, as upstream's PTX: a seventh of the size.
        image = f"--image3=kind=elf,sm={job.arch},file=x.cubin"
        words = ("-64", "--create=x.fatbin", image, "--compress-all")
        self._run(tools / "fatbinary", *words, folder=folder, job=job)
        fatbin = folder / "x.fatbin"
        if not _holds(fatbin, job.arch):
            raise BuildError(f"{job.where}: fatbinary made no code for sm_{job.arch}")

        with fatbin.open("rb") as stream:
            os.fsync(stream.fileno())
        fatbin.rename(task.place)

    def _run(
        self,
        tool: Path,
        *words: str,
        folder: Path,
        job: Job,
    ) -> None:
        """Run a tool within the job's limits.

        Raises BuildError if the tool refuses its input, StorageError if the disk is full, HostError
        if the tool was killed, cannot run, or the assembling was stopped.
        """
        self._check_stopped(job)
        environment = {**_TUNABLES, **os.environ}
        with Follow(
            tool,
            *words,
            cwd=folder,
            env=environment,
            resources=job.resources,
        ) as running:
            for _line in running:
                self._check_stopped(job)

        done = running.done
        if not done.ended_itself:
            raise done.error(
                HostError,
                why=f"{job.where}: it was killed, or cannot run here",
                hint="free some memory, and run again: what is assembled already is kept",
            )
        if done.trouble and shutil.disk_usage(folder).free < BYTES_PER_MIB:
            raise StorageError(
                f"{folder.parent}: the disk is full",
                hint="free some space (0.1 GB)",
            )
        if done.trouble:
            raise done.error(BuildError, why=job.where)

    def _check_stopped(self, job: Job) -> None:
        if self.stopped.is_set():
            raise HostError(f"{job.where}: the assembling was stopped")


def _oldest_toolkit(job: Job) -> Toolkit:
    """Return the oldest toolkit that reads the PTX of a job. Raises BuildError if none does."""
    for row in toolkits():
        if job.entry.version <= row.ptx:
            return row

    version = ".".join(map(str, job.entry.version))
    raise BuildError(
        f"{job.where} is PTX {version}; ptxas {toolkits()[-1].nvcc} is older"
    )


def _checked_options(options: Iterable[str]) -> Iterator[str]:
    """Yield the options of a compiler as words for ptxas. Raises BuildError for an unknown one."""
    words = iter(options)
    for word in words:
        if re.fullmatch(_SWITCHES, word):
            yield word
        elif re.fullmatch(_VALUES, word) and re.fullmatch(
            r"\w+", value := next(words, "")
        ):
            yield f"{word}={value}"
        else:
            raise BuildError(
                f"it was compiled with {word}, which patchkit does not pass on"
            )


def _holds(fatbin: Path, arch: str) -> bool:
    """Return whether a file is one fat binary that holds machine code for the arch only."""
    with fatbin.open("rb") as stream:
        whole = Section(".nv_fatbin", 0, fatbin.stat().st_size)
        try:
            names = [entry.name for entry in read_entries(stream, [whole], str(fatbin))]
        except SourceError:
            return False  # cut off by a power cut
    return names == [f"sm_{arch}"]
