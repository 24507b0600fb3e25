"""What the dynamic loader reads of an ELF file, with the standard library alone.

As the loader does, this goes by program headers, and needs no sections. Every table is bounded, so
that a hostile file costs milliseconds and a few MiB at most, and ends in a SourceError.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from patchkit.errors import SourceError

# e_machine → the name that uname has for it; of others the number.
_MACHINES = {62: "x86_64", 183: "aarch64"}
_MAGIC = b"\x7fELF"
_LITTLE_64 = b"\x02\x01"  # EI_CLASS and EI_DATA of every CPU that vLLM's wheels are for
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_ENTRY = struct.Struct("<qQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_PT_LOAD, _PT_DYNAMIC = 1, 2
_NULL, _NEEDED, _HASH, _STRTAB, _SYMTAB, _STRSZ, _SONAME, _RPATH = 0, 1, 4, 5, 6, 10, 14, 15
_RUNPATH, _GNU_HASH = 29, 0x6FFFFEF5
_STRINGS = (_NEEDED, _SONAME, _RPATH, _RUNPATH)
_UNDEFINED = 0  # SHN_UNDEF: of a symbol that is only needed
_LOADABLE = (2, 3)  # ET_EXEC, ET_DYN
# More than any real library has: program headers, entries of the dynamic section, bytes of a string
# and of all strings, symbols in one bucket.
_MOST_PROGRAMS, _MOST_ENTRIES, _LONGEST, _MOST_TEXT, _MOST_SYMBOLS = 512, 4096, 65536, 1 << 20, 9999


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamic:
    """The facts of a program or library; ``machine`` is named as uname names it."""

    machine: str
    soname: str = ""
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()


def read_dynamic(path: Path) -> Dynamic:
    """The facts of a file. Raises SourceError if it is no whole ELF file; OSError."""
    with path.open("rb") as file:
        image = _Image(file, str(path))
        texts: dict[int, list[str]] = {tag: [] for tag in _STRINGS}
        left = _MOST_TEXT
        for tag, value in image.entries:
            if tag in texts:
                texts[tag].append(image.string(value))
                left -= len(texts[tag][-1])
                image.check(left >= 0, "its strings are longer than those of any real library")
        return Dynamic(
            machine=image.machine,
            soname="".join(texts[_SONAME]),
            needed=tuple(texts[_NEEDED]),
            rpath=_folders(texts[_RPATH]),
            runpath=_folders(texts[_RUNPATH]),
        )


def exports(path: Path, symbol: str) -> bool:
    """Whether a library defines a symbol for others. Raises as ``read_dynamic``."""
    with path.open("rb") as file:
        image = _Image(file, str(path))
        name = symbol.encode() + b"\0"
        for number in image.candidates(symbol.encode()):
            place, section = image.symbol(number)
            if image.text(place, len(name)) == name:
                return section != _UNDEFINED
        return False


def _folders(paths: list[str]) -> tuple[str, ...]:
    return tuple(folder for path in paths for folder in path.split(":") if folder)


class _Image:
    """An open file, read by the addresses that its program headers give to it."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file.fileno(), name
        self._size = os.fstat(self._file).st_size
        header = os.pread(self._file, _HEADER.size, 0)
        if header[:4] != _MAGIC:
            raise SourceError(
                f"{name} is not an ELF file", hint="give a shared library or program of Linux"
            )
        self.check(len(header) == _HEADER.size, "its header is cut short")
        self.check(header[4:6] == _LITTLE_64, "it is not for a 64-bit little-endian machine")
        _, kind, machine, _, _, place, _, _, _, size, count, _, _, _ = _HEADER.unpack(header)
        self.machine = _MACHINES.get(machine, str(machine))
        self.check(kind in _LOADABLE, "it is neither a program nor a shared library")
        self.check(size == _PROGRAM.size, "its program headers have another size")
        self.check(count <= _MOST_PROGRAMS, "it has more program headers than any real library")
        self._loads: list[tuple[int, int, int]] = []
        self.entries: list[tuple[int, int]] = []
        for kind, _, offset, address, _, length, _, _ in _PROGRAM.iter_unpack(
            self._read(place, size * count)
        ):
            if kind == _PT_LOAD:
                self.check(offset + length <= self._size, "a segment ends behind its end")
                self._loads.append((address, length, offset))
            elif kind == _PT_DYNAMIC:
                self.entries = list(self._dynamic(offset, length))
        self._tags = dict(self.entries)

    def check(self, holds: bool, what: str) -> None:
        """Raise SourceError unless it holds."""
        if not holds:
            raise SourceError(
                f"{self._name} cannot be read: {what}",
                why="the file is cut short or damaged, or it was made to mislead",
                hint="download or build it again, and compare its sha256",
            )

    def _read(self, offset: int, length: int) -> bytes:
        self.check(offset + length <= self._size, "a table ends behind its end")
        data = os.pread(self._file, length, offset)
        self.check(len(data) == length, "it became shorter meanwhile")
        return data

    def _dynamic(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        length = min(length, _MOST_ENTRIES * _ENTRY.size) // _ENTRY.size * _ENTRY.size
        for tag, value in _ENTRY.iter_unpack(self._read(offset, length)):
            if tag == _NULL:
                return
            yield tag, value
        self.check(False, "its dynamic section does not end")

    def _at(self, address: int, length: int) -> bytes:
        for start, size, offset in self._loads:
            if start <= address and address + length <= start + size:
                return self._read(offset + address - start, length)
        self.check(False, f"nothing is loaded at {address:#x}")
        raise AssertionError

    def text(self, place: int, length: int) -> bytes:
        """So many bytes of the table of strings; fewer where it ends."""
        size = self._tags.get(_STRSZ, 0)
        self.check(place <= size, "a string lies behind the table of strings")
        return self._at(self._tags.get(_STRTAB, 0) + place, min(length, size - place))

    def string(self, place: int) -> str:
        found, end, _ = self.text(place, _LONGEST).partition(b"\0")
        self.check(bool(end), "a string does not end")
        return os.fsdecode(found)

    def symbol(self, number: int) -> tuple[int, int]:
        """Where its name is, and in which section it is defined."""
        data = self._at(self._tags.get(_SYMTAB, 0) + number * _SYMBOL.size, _SYMBOL.size)
        place, _, _, section, _, _ = _SYMBOL.unpack(data)
        return place, section

    def candidates(self, symbol: bytes) -> Iterator[int]:
        """Numbers of symbols that may have this name, by one of the two hash tables."""
        if _GNU_HASH in self._tags:
            return self._by_gnu_hash(self._tags[_GNU_HASH], symbol)
        return self._by_hash(self._tags[_HASH], symbol) if _HASH in self._tags else iter(())

    def _word(self, address: int) -> int:
        return int.from_bytes(self._at(address, 4), "little")

    def _by_gnu_hash(self, table: int, symbol: bytes) -> Iterator[int]:
        buckets, first, filters, _ = struct.unpack("<4I", self._at(table, 16))
        wanted = 5381
        for byte in symbol:
            wanted = (wanted * 33 + byte) & 0xFFFFFFFF
        start = table + 16 + filters * 8
        number = self._word(start + wanted % buckets * 4) if buckets else 0
        if number < first or not number:
            return
        chain = start + (buckets - first) * 4
        for each in range(number, number + _MOST_SYMBOLS):
            found = self._word(chain + each * 4)
            # The lowest bit is no part of the hash: it marks the last one of a chain.
            if found | 1 == wanted | 1:
                yield each
            if found & 1:
                return
        self.check(False, "a chain of its symbols does not end")

    def _by_hash(self, table: int, symbol: bytes) -> Iterator[int]:
        buckets, _ = struct.unpack("<2I", self._at(table, 8))
        wanted = 0
        for byte in symbol:
            wanted = (wanted << 4) + byte
            wanted = (wanted ^ (wanted >> 24 & 0xF0)) & 0x0FFFFFFF
        if not buckets:
            return
        number = wanted % buckets - buckets  # the buckets lie before the chain of symbol 0
        for _ in range(_MOST_SYMBOLS):
            number = self._word(table + 8 + (buckets + number) * 4)
            if not number:
                return
            yield number
        self.check(False, "a chain of its symbols does not end")
