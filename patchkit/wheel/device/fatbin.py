"""Read which machine code and which PTX the fat binaries of a library hold.

Nothing is decompressed: the headers say it all. The layout is little-endian, and was measured on
libraries that CUDA 11.8 to 13.4 had built, against what NVIDIA's cuobjdump says of them.

A section holds containers one after another, each at a multiple of 8, with less than an alignment
of zeros between them:

    u32 magic 0xBA55ED50, u16 version 1, u16 size of this header, u64 size of the entries

Its entries follow, header and payload in turn (the header has more fields behind these, 64 to 120
bytes in all):

    u16 kind, u16 version 0x101, u32 size of this header, u64 size of the payload,
    12 bytes, u32 arch (121 is sm_121), 8 bytes, u64 flags
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedIOBase

from patchkit.elf import Section, damaged
from patchkit.errors import SourceError
from patchkit.target import Arch

_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ12xI8xQ")
_LEAST_HEADER = 64
_MAGIC = 0xBA55ED50
_MOST_PADDING = 4096  # sections of aarch64 objects are aligned to 256
_KINDS = {1: "ptx", 2: "sass", 8: "lto"}
_LZ4, _ZSTD, _SPECIFIC, _FAMILY = 0x2000, 0x8000, 0x100000, 0x200000
# The 2.32.3 of NCCL, 346 MB, has 1,498.
_MOST_ENTRIES = 250_000


@dataclass(frozen=True, slots=True)
class CodeEntry:
    """One piece of device code.

    ``kind`` is ``sass``, ``ptx``, ``lto`` (code for a linker at run time), or ``kind N`` for one
    that is not known; ``compression`` is ``none``, ``lz4`` or ``zstd``; ``size`` is in bytes as
    stored, with its header. Entries of one ``container`` (its offset in the file) hold the same
    kernels for several archs: a device takes one of them.
    """

    kind: str
    arch: Arch
    compression: str
    size: int
    container: int


def read_entries(
    stream: BufferedIOBase, sections: Iterable[Section], name: str
) -> tuple[CodeEntry, ...]:
    """Read the entries of some sections, in the order of the file.

    Raises SourceError, calling the file ``name``, if a section is not a row of containers.
    """
    found: list[CodeEntry] = []
    for section in sections:
        for entry in _Walker(stream, section, name).walk():
            found.append(entry)
            if len(found) > _MOST_ENTRIES:
                raise damaged(name, f"it has more than {_MOST_ENTRIES:,} pieces of device code")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Walker:
    stream: BufferedIOBase
    section: Section
    name: str

    def walk(self) -> Iterator[CodeEntry]:
        position, end = self.section.offset, self.section.offset + self.section.size
        while True:
            self.stream.seek(position)
            padding = self.stream.read(min(_MOST_PADDING, end - position))
            position += len(padding) - len(padding.lstrip(b"\0"))
            if position >= end:
                return
            magic, version, header, size = self._unpack(_CONTAINER, position, end)
            if (magic, version) != (_MAGIC, 1) or header < _CONTAINER.size:
                raise self._damaged(position, "there is no fat binary of version 1 here")
            start, position = position, position + header + size
            if position > end:
                raise self._damaged(start, "the fat binary ends behind its section")
            yield from self._entries(start + header, position, start)

    def _entries(self, position: int, end: int, container: int) -> Iterator[CodeEntry]:
        while position < end:
            number, _version, header, size, arch, flags = self._unpack(_ENTRY, position, end)
            if header < _LEAST_HEADER or header + size > end - position:
                raise self._damaged(position, "an entry does not fit into its fat binary")
            marks = ("a" if flags & _SPECIFIC else "") + ("f" if flags & _FAMILY else "")
            if not 10 <= arch <= 999 or len(marks) > 1:  # one arch is never both a and f
                raise self._damaged(position, f"an entry is for the arch {arch}{marks}")
            kind = _KINDS.get(number, f"kind {number}")
            yield CodeEntry(
                kind=kind,
                arch=Arch(*divmod(arch, 10), marks, kind == "ptx"),
                compression="zstd" if flags & _ZSTD else "lz4" if flags & _LZ4 else "none",
                size=header + size,
                container=container,
            )
            position += header + size

    def _unpack(self, layout: struct.Struct, position: int, end: int) -> tuple[int, ...]:
        self.stream.seek(position)
        data = self.stream.read(min(layout.size, end - position))
        if len(data) < layout.size:
            raise self._damaged(position, "a header is cut off")
        return layout.unpack(data)

    def _damaged(self, position: int, what: str) -> SourceError:
        return damaged(self.name, f"{self.section.name} at byte {position}: {what}")
