"""Read which machine code and which PTX the fat binaries of a library hold.

Only headers are read, and nothing is decompressed. The layout is little-endian. It was found by
comparing libraries that CUDA 11.8 to 13.4 built with what NVIDIA's cuobjdump prints for them.

A section holds containers (fat binaries), each at a multiple of 8, with zeros between them:

    u32 magic 0xBA55ED50, u16 version 1, u16 size of this header, u64 size of the entries

The entries of a container follow, header and payload in turn. A header has 64 to 120 bytes; it
begins with these fields:

    u16 kind, u16 version 0x101, u32 size of this header, u64 size of the payload,
    u32 size of the compressed part of the payload, u32 offset of a pair in this header,
    u16 minor and u16 major of the PTX version, u32 arch (121 is sm_121), 8 bytes, u64 flags,
    8 bytes, u64 size of the decompressed payload

The pair is the offset and size, in this header, of options for ptxas.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedIOBase

from patchkit.elf import Section, damaged
from patchkit.frozen import positional
from patchkit.target import Arch, Load, Target, find_load, find_ptx_load

CONTAINER = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQIIHHI8xQ8xQ")
_LEAST_HEADER = 64
MAGIC = 0xBA55ED50
_PADDING = 4096  # bytes to read at once when skipping zeros; aarch64 objects are aligned to 256
_PREFIXES = {"sass": "sm", "ptx": "compute", "lto": "lto"}
_KINDS = {1: "ptx", 2: "sass", 8: "lto"}
# Flags of an entry.
_LZ4 = 0x2000
_ZSTD = 0x8000
_SPECIFIC = 0x100000
_FAMILY = 0x200000
_MOST_ENTRIES = 250_000  # NCCL 2.32.3, 346 MB, has 1,498
_MOST_PTX = 1 << 29  # bytes of one module; the largest of vLLM has 34 million


@dataclass(frozen=True, slots=True)
class DeviceCode:
    """A sort of device code.

    ``kind`` is ``sass`` (machine code), ``ptx``, ``lto`` (code for a linker at run time), or
    ``kind N`` for an unknown number N.
    """

    kind: str
    arch: Arch

    @property
    def name(self) -> str:
        """Return nvcc's name: ``sm_121a`` for machine code, ``compute_121a`` for PTX."""
        return f"{_PREFIXES.get(self.kind, self.kind)}_{self.arch.gencode}"

    def reach(self, target: Target) -> Load:
        """Return how the code reaches a device; NONE for code that only a linker reads."""
        if self.kind == "sass":
            return find_load(self.arch, target.capability)
        if self.kind == "ptx":
            return find_ptx_load(self.arch, target.capability)
        return Load.NONE


@dataclass(frozen=True, slots=True)
class CodeEntry(DeviceCode):
    """One piece of device code.

    ``compression`` is ``none``, ``lz4`` or ``zstd``. ``size`` is the size in bytes as stored, with
    the header; ``unpacked_size`` is that of the decompressed payload. ``offset`` is where the entry
    begins in the file, ``container`` where its container begins. The entries of a container hold
    the same kernels for several archs, and a device loads one of them. ``version`` is the PTX
    version.
    """

    compression: str
    size: int
    container: int
    offset: int
    unpacked_size: int
    version: tuple[int, int]


Entries = tuple[CodeEntry, ...]


def read_entries(
    stream: BufferedIOBase,
    sections: Iterable[Section],
    name: str,
) -> Entries:
    """Return the entries of some sections, in the order of the sections.

    Raises SourceError if a section is not a row of containers, or holds too many entries. ``name``
    is the file's name in the error.
    """
    entries: list[CodeEntry] = []
    for section in sections:
        for entry in _SectionReader(stream, section, name).walk():
            entries.append(entry)
            if len(entries) > _MOST_ENTRIES:
                raise damaged(
                    name,
                    f"it has more than {_MOST_ENTRIES:,} pieces of device code",
                )
    return tuple(entries)


@positional
class _SectionReader:
    stream: BufferedIOBase
    section: Section
    name: str

    def walk(self) -> Iterator[CodeEntry]:
        """Yield the entries of each container of the section."""
        place = self.section.offset
        end = place + self.section.size
        while (place := self._skip_zeros(place, end)) < end:
            magic, version, header, size = self._read_header(CONTAINER, place, end)
            is_known = (magic, version) == (MAGIC, 1) and header >= CONTAINER.size
            self._check(is_known, place, "there is no fat binary of version 1 here")
            container = place
            place += header
            stop = place + size
            complaint = "the fat binary ends behind its section"
            self._check(stop <= end, container, complaint)

            while place < stop:
                entry = self._read_entry(place, stop, container)
                yield entry
                place += entry.size

    def _skip_zeros(self, place: int, end: int) -> int:
        """Return the offset behind zeros: padding, or a container that a tool overwrote."""
        while place < end:
            self.stream.seek(place)
            padding = self.stream.read(min(_PADDING, end - place))
            data = padding.lstrip(b"\0")
            place += len(padding) - len(data)
            if data:
                break
        return place

    def _read_entry(self, place: int, end: int, container: int) -> CodeEntry:
        number, _, header, size, _, _, *fields = self._read_header(ENTRY, place, end)
        minor, major, arch, flags, unpacked_size = fields
        fits = header >= _LEAST_HEADER and place + header + size <= end
        self._check(fits, place, "an entry does not fit into its fat binary")

        suffix = "a" if flags & _SPECIFIC else ""
        if flags & _FAMILY:
            suffix += "f"
        # No arch has both suffixes, a and f.
        is_real = 10 <= arch <= 999 and len(suffix) < 2
        self._check(is_real, place, f"an entry is for the arch {arch}{suffix}")

        kind = _KINDS.get(number, f"kind {number}")
        is_possible = kind != "ptx" or unpacked_size <= _MOST_PTX
        complaint = f"an entry says that it is {unpacked_size:,} bytes of PTX"
        self._check(is_possible, place, complaint)

        compression = "none"
        if flags & _ZSTD:
            compression = "zstd"
        elif flags & _LZ4:
            compression = "lz4"
        return CodeEntry(
            kind=kind,
            arch=Arch(*divmod(arch, 10), suffix, kind == "ptx"),
            compression=compression,
            size=header + size,
            container=container,
            offset=place,
            unpacked_size=size if compression == "none" else unpacked_size,
            version=(major, minor),
        )

    def _read_header(
        self,
        layout: struct.Struct,
        place: int,
        end: int,
    ) -> tuple[int, ...]:
        self.stream.seek(place)
        data = self.stream.read(min(layout.size, end - place))
        self._check(len(data) == layout.size, place, "a header is cut off")
        return layout.unpack(data)

    def _check(self, holds: bool, place: int, complaint: str) -> None:
        """Raise SourceError with the offset and the complaint unless ``holds`` is true."""
        if not holds:
            raise damaged(
                self.name,
                f"{self.section.name} at byte {place}: {complaint}",
            )
