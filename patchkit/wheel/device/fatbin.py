"""Read which machine code and which PTX the fat binaries of a library hold.

Nothing is decompressed: the headers say it all. The layout is little-endian, and was measured on
libraries that CUDA 11.8 to 13.4 had built, against what NVIDIA's cuobjdump says of them.

A section holds containers one after another, each at a multiple of 8, with zeros between them:

    u32 magic 0xBA55ED50, u16 version 1, u16 size of this header, u64 size of the entries

Its entries follow, header and payload in turn (the header has more fields behind these, 64 to 120
bytes in all):

    u16 kind, u16 version 0x101, u32 size of this header, u64 size of the payload,
    u32 size of what is compressed in it, u32 place of a pair in this header, u16 minor and u16
    major of the PTX version, u32 arch (121 is sm_121), 8 bytes, u64 flags, 8 bytes,
    u64 size when decompressed

The pair is the place and size, in this header, of the options that ptxas was or has to be given.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedIOBase

from patchkit.elf import Section, damaged
from patchkit.target import Arch, Load, Target, load, load_ptx

CONTAINER = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQIIHHI8xQ8xQ")
_LEAST_HEADER = 64
MAGIC = 0xBA55ED50
_PADDING = 4096  # bytes that are looked at once; aarch64 objects are aligned to 256
_PREFIXES = {"sass": "sm", "ptx": "compute", "lto": "lto"}
_KINDS = {1: "ptx", 2: "sass", 8: "lto"}
_LZ4, _ZSTD, _SPECIFIC, _FAMILY = 0x2000, 0x8000, 0x100000, 0x200000
# The 2.32.3 of NCCL, 346 MB, has 1,498.
_MOST_ENTRIES = 250_000
_MOST_PTX = 1 << 29  # bytes of one module; the largest of vLLM has 34 million


@dataclass(frozen=True, slots=True)
class DeviceCode:
    """A sort of device code.

    ``kind`` is ``sass``, ``ptx``, ``lto`` (code for a linker at run time), or ``kind N`` for one
    that is not known.
    """

    kind: str
    arch: Arch

    @property
    def name(self) -> str:
        """``sm_121a`` for machine code, ``compute_121a`` for PTX, as nvcc writes it."""
        return f"{_PREFIXES.get(self.kind, self.kind)}_{self.arch.gencode}"

    def reach(self, target: Target) -> Load:
        """Return how it reaches a device. What only a linker reads does not, by itself."""
        if self.kind == "sass":
            return load(self.arch, target.capability)
        return (
            load_ptx(self.arch, target.capability) if self.kind == "ptx" else Load.NONE
        )


@dataclass(frozen=True, slots=True)
class CodeEntry(DeviceCode):
    """One piece of device code.

    ``compression`` is ``none``, ``lz4`` or ``zstd``; ``size`` is in bytes as stored, with its
    header, ``plain`` without and decompressed. Entries of one ``container`` (its offset in the
    file) hold the same kernels for several archs: a device takes one of them. ``offset`` is that of
    the entry in the file, ``version`` the PTX version.
    """

    compression: str
    size: int
    container: int
    offset: int
    plain: int
    version: tuple[int, int]


def read_entries(
    stream: BufferedIOBase, sections: Iterable[Section], name: str
) -> tuple[CodeEntry, ...]:
    """Read the entries of some sections, in the order of the file.

    Raises SourceError, calling the file ``name``, if a section is not a row of containers.
    """
    found: list[CodeEntry] = []
    for section in sections:
        for entry in _walk_section(stream, section, name):
            found.append(entry)
            if len(found) > _MOST_ENTRIES:
                raise damaged(
                    name, f"it has more than {_MOST_ENTRIES:,} pieces of device code"
                )
    return tuple(found)


def _walk_section(
    stream: BufferedIOBase, section: Section, name: str
) -> Iterator[CodeEntry]:
    position, end = section.offset, section.offset + section.size

    def check_that(holds: bool, place: int, complaint: str) -> None:
        if not holds:
            raise damaged(name, f"{section.name} at byte {place}: {complaint}")

    def read_header(layout: struct.Struct, end: int) -> tuple[int, ...]:
        stream.seek(position)
        data = stream.read(min(layout.size, end - position))
        check_that(len(data) == layout.size, position, "a header is cut off")
        return layout.unpack(data)

    while True:
        stream.seek(position)
        padding = stream.read(min(_PADDING, end - position))
        position += (zeros := len(padding) - len(padding.lstrip(b"\0")))
        if position >= end:
            return
        if zeros == len(padding):  # a tool may have cleared what was behind
            continue
        magic, version, header, size = read_header(CONTAINER, end)
        known = (magic, version) == (MAGIC, 1) and header >= CONTAINER.size
        check_that(known, position, "there is no fat binary of version 1 here")
        container, last = position, position + header + size
        check_that(last <= end, container, "the fat binary ends behind its section")
        position += header
        while position < last:
            number, _, header, size, _, _, *rest = read_header(ENTRY, last)
            minor, major, arch, flags, plain = rest
            fits = header >= _LEAST_HEADER and header + size <= last - position
            check_that(fits, position, "an entry does not fit into its fat binary")
            marks = ("a" if flags & _SPECIFIC else "") + (
                "f" if flags & _FAMILY else ""
            )
            real = (
                10 <= arch <= 999 and len(marks) < 2
            )  # one arch is never both a and f
            check_that(real, position, f"an entry is for the arch {arch}{marks}")
            kind = _KINDS.get(number, f"kind {number}")
            possible = kind != "ptx" or plain <= _MOST_PTX
            check_that(
                possible, position, f"an entry says that it is {plain:,} bytes of PTX"
            )
            yield CodeEntry(
                kind=kind,
                arch=Arch(*divmod(arch, 10), marks, kind == "ptx"),
                compression="zstd"
                if flags & _ZSTD
                else "lz4"
                if flags & _LZ4
                else "none",
                size=header + size,
                container=container,
                offset=position,
                plain=plain if flags & (_LZ4 | _ZSTD) else size,
                version=(major, minor),
            )
            position += header + size
        position = last
