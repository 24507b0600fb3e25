"""Read ELF files: for which machine they are, what they need and export, where their sections lie.

What a library needs is read as the dynamic loader reads it, by program headers. Sections are for
tools: a file may have none. Every table has a limit, so that a hostile file costs milliseconds and
a few MiB, and ends in a SourceError. With the standard library alone, since nodes run this.
"""

from __future__ import annotations

import io
import os
import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from patchkit.errors import SourceError

MAGIC = b"\x7fELF"
_LITTLE_64 = b"\x02\x01"  # EI_CLASS and EI_DATA of every CPU that vLLM's wheels are for
# Elf64_Ehdr, Elf64_Phdr, Elf64_Shdr, Elf64_Dyn, Elf64_Sym, Elf64_Verneed and Elf64_Vernaux of
# elf.h, little-endian and without padding.
HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
PROGRAM = struct.Struct("<IIQQQQQQ")
SECTION = struct.Struct("<IIQQQQIIQQ")
_ENTRY = struct.Struct("<qQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_NEED, _NEEDED_VERSION = struct.Struct("<HHIII"), struct.Struct("<IHHII")

# e_machine → the name that uname has for it; others are shown by their number.
_MACHINES = {
    62: "x86_64",
    183: "aarch64",
    21: "ppc64le",
    243: "riscv64",
    258: "loongarch64",
    190: "cuda",
}
_LOADABLE = (2, 3)  # ET_EXEC, ET_DYN
PT_LOAD, _PT_DYNAMIC = 1, 2
# Tags of the dynamic section: DT_NULL, DT_NEEDED, …
_NULL, _NEEDED, _STRTAB, _STRSZ, _SONAME, _RPATH, _RUNPATH = 0, 1, 5, 10, 14, 15, 29
_VERNEED = 0x6FFFFFFE
_SHT_NULL, _SHT_STRTAB, _SHT_NOBITS = 0, 3, 8
_SHN_XINDEX = 0xFFFF  # e_shstrndx of a file with too many sections for 16 bits

# More than any real library has: program headers, entries of the dynamic section, bytes of a string
# and of all strings, symbol versions.
_MOST_PROGRAMS, _MOST_ENTRIES, _LONGEST, _MOST_TEXT = 512, 4096, 65536, 1 << 20
_MOST_VERSIONS = 4096
# Device code has some for each kernel, with names of kilobytes.
_MOST_SECTIONS, _MOST_NAMES = 1 << 18, 1 << 25


@dataclass(frozen=True, slots=True)
class Section:
    """A section that has contents in the file, at ``offset`` and of ``size`` bytes."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamic:
    """The facts of a file for the dynamic loader; ``machine`` is named as uname names it.

    Device code is of the machine ``cuda``. Fields are empty for what the file lacks.
    """

    machine: str
    soname: str = ""
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Library(Dynamic):
    """All the facts of a file, for tools.

    ``versions`` are the symbol versions that it needs (``GLIBC_2.34``) of each needed library,
    lowest first.
    """

    versions: Mapping[str, tuple[str, ...]]
    sections: tuple[Section, ...]

    def highest(self, family: str) -> str:
        """Return the highest version that it needs of ``GLIBC``, ``GLIBCXX``, …; "" for none.

        It decides on which distributions the file can be loaded.
        """
        numbered = re.compile(rf"{re.escape(family)}_\d[\d.]*")
        names = {name for needed in self.versions.values() for name in needed}
        return max(filter(numbered.fullmatch, names), key=by_version, default="")


def read_dynamic(path: Path) -> Dynamic:
    """Return what the loader asks of a program or library. Raises SourceError, OSError."""
    with path.open("rb") as stream:
        image = _Image(stream, str(path))
        image.check(
            image.kind in _LOADABLE, "it is neither a program nor a shared library"
        )
        return Dynamic(**image.dynamic_fields())


def parse_library(stream: BufferedIOBase, name: str) -> Library:
    """Return all facts of an open file, which errors call ``name``; object files have few.

    Raises SourceError if it is not ELF, or damaged; OSError.
    """
    image = _Image(stream, name)
    sections = tuple(image.sections())
    versions: dict[str, set[str]] = {}
    # Chains of a hostile file may overlap: the limit is one for all of them.
    left, address = _MOST_VERSIONS, max(image.tags.get(_VERNEED, [0]))
    while address:
        _, _, file, first, following = _NEED.unpack(image.read_at(address, _NEED.size))
        names = versions.setdefault(image.string(file), set())
        place = address + first
        while place:
            left -= 1
            image.check(
                left >= 0, "it needs more symbol versions than any real library"
            )
            *_, text, distance = _NEEDED_VERSION.unpack(
                image.read_at(place, _NEEDED_VERSION.size)
            )
            names.add(image.string(text))
            place = distance and place + distance
        address = following and address + following
    return Library(
        **image.dynamic_fields(),
        versions={
            file: tuple(sorted(names, key=by_version))
            for file, names in versions.items()
        },
        sections=sections,
    )


def exports(path: Path, symbol: str) -> bool:
    """Return whether a library defines a symbol for others, by its sections.

    Raises as ``read_dynamic`` does.
    """
    with path.open("rb") as stream:
        image = _Image(stream, str(path))
        sections = {section.name: section for section in image.sections()}
        names, table = sections.get(".dynstr"), sections.get(".dynsym")
        if names is None or table is None:
            return False
        image.check(names.size <= _MOST_NAMES, "the names of its symbols are too long")
        image.check(
            table.size <= _MOST_NAMES, "it has more symbols than any real library"
        )
        text = image.read(names.offset, names.size)
        # A name may be the end of a longer one.
        found = re.finditer(re.escape(symbol.encode() + b"\0"), text)
        if not (places := {match.start() for match in found}):
            return False
        data = image.read(table.offset, table.size // _SYMBOL.size * _SYMBOL.size)
    symbols = _SYMBOL.iter_unpack(data)
    return any(place in places and section for place, _, _, section, _, _ in symbols)


def by_version(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts ``GLIBC_2.4`` before ``GLIBC_2.17``."""
    # Longer runs of digits sort as text: int() refuses or takes long for those of a hostile file.
    parts = re.findall(r"\d{1,9}|\D+|\d+", name)
    return [
        (int(part), "") if len(part) < 10 and part.isdecimal() else (-1, part)
        for part in parts
    ]


def damaged(name: str, what: str) -> SourceError:
    """Return the error for bytes that contradict their format."""
    return SourceError(
        f"{name} cannot be read: {what}",
        why="the file is cut short or damaged, or it was made to mislead",
        hint="download or build it again, and compare its sha256",
    )


class _Image:
    """An open file, read by offsets, and by the addresses that its program headers give to it."""

    def __init__(self, stream: BufferedIOBase, name: str) -> None:
        self._stream, self._name = stream, name
        # Bytes of strings still to be copied: many entries may name one long string.
        self._text_left = _MOST_TEXT
        self._size = stream.seek(0, io.SEEK_END)
        stream.seek(0)
        header = stream.read(HEADER.size)
        if header[:4] != MAGIC:
            raise SourceError(
                f"{name} is not an ELF file",
                hint="give a shared library of Linux, or a wheel",
            )
        self.check(len(header) == HEADER.size, "its header is cut short")
        self.check(
            header[4:6] == _LITTLE_64, "it is not for a 64-bit little-endian machine"
        )
        _, self.kind, machine, _, _, *self._tables = HEADER.unpack(
            header
        )  # from e_phoff on
        self.machine = _MACHINES.get(machine, str(machine))

    def check(self, holds: bool, what: str) -> None:
        """Raise SourceError unless it holds."""
        if not holds:
            raise damaged(self._name, what)

    def read(self, offset: int, length: int) -> bytes:
        self.check(
            offset + length <= self._size, "a table ends behind the end of the file"
        )
        self._stream.seek(offset)
        data = self._stream.read(length)
        self.check(len(data) == length, "it became shorter meanwhile")
        return data

    def sections(self) -> Iterator[Section]:
        """Yield the sections that have contents. There must be some."""
        _, place, _, _, _, _, size, count, names = self._tables
        self.check(
            place > 0, "it has no section headers, so nobody can say what it holds"
        )
        self.check(size == SECTION.size, "its section headers have another size")
        if (
            not count or names == _SHN_XINDEX
        ):  # in the first one, for more than 16 bits hold
            first = SECTION.unpack(self.read(place, size))
            count, names = (
                count or first[5],
                first[6] if names == _SHN_XINDEX else names,
            )
        self.check(
            count <= _MOST_SECTIONS, "it has more sections than any real library"
        )
        headers = list(SECTION.iter_unpack(self.read(place, count * size)))
        self.check(
            names < count and headers[names][1] == _SHT_STRTAB,
            "its sections have no names",
        )
        self.check(
            headers[names][5] <= _MOST_NAMES, "the names of its sections are too long"
        )
        text = self.read(*headers[names][4:6])
        # Many sections may share one long name: what is copied is limited, not the table alone.
        left = _MOST_NAMES
        for start, kind, _, _, offset, length, *_ in headers:
            if kind not in (_SHT_NULL, _SHT_NOBITS):
                end = text.find(b"\0", start)
                self.check(end >= 0, "the name of a section does not end")
                left -= end - start
                self.check(left >= 0, "the names of its sections are too long")
                name = os.fsdecode(text[start:end])
                over = offset + length > self._size
                self.check(
                    not over, f"the section {name!r} ends behind the end of the file"
                )
                yield Section(name, offset, length)

    @cached_property
    def _segments(self) -> list[tuple[int, ...]]:
        """Return the program headers; none for an object or device code: no loader takes them."""
        place, _, _, _, size, count, _, _, _ = self._tables
        # NVIDIA's device code is ELF as well, and no loader of the system takes it.
        if self.kind not in _LOADABLE or self.machine == "cuda" or not count:
            return []
        self.check(size == PROGRAM.size, "its program headers have another size")
        self.check(
            count <= _MOST_PROGRAMS, "it has more program headers than any real library"
        )
        return list(PROGRAM.iter_unpack(self.read(place, size * count)))

    @cached_property
    def tags(self) -> Mapping[int, list[int]]:
        """Return the values of the dynamic section by tag."""
        found: dict[int, list[int]] = defaultdict(list)
        for kind, _, offset, _, _, length, _, _ in self._segments:
            if kind == _PT_DYNAMIC:
                # No more than the limit is read; the end is then missing: the error below.
                length = (
                    min(length, _MOST_ENTRIES * _ENTRY.size)
                    // _ENTRY.size
                    * _ENTRY.size
                )
                for tag, value in _ENTRY.iter_unpack(self.read(offset, length)):
                    if tag == _NULL:
                        return found
                    found[tag].append(value)
                self.check(False, "its dynamic section does not end")
        return found

    def dynamic_fields(self) -> dict[str, Any]:
        """Return what the loader asks, as the fields of Dynamic."""
        texts = {
            tag: tuple(map(self.string, self.tags.get(tag, ())))
            for tag in (_NEEDED, _SONAME, _RPATH, _RUNPATH)
        }
        rpath, runpath = (
            tuple(folder for path in texts[tag] for folder in path.split(":") if folder)
            for tag in (_RPATH, _RUNPATH)
        )
        return {
            "machine": self.machine,
            "soname": "".join(texts[_SONAME]),
            "needed": texts[_NEEDED],
            "rpath": rpath,
            "runpath": runpath,
        }

    def read_at(self, address: int, length: int) -> bytes:
        for kind, _, offset, start, _, size, _, _ in self._segments:
            if (
                kind == PT_LOAD
                and start <= address
                and address + length <= start + size
            ):
                return self.read(offset + address - start, length)
        raise damaged(self._name, f"nothing is loaded at {address:#x}")

    def string(self, place: int) -> str:
        size = max(self.tags.get(_STRSZ, [0]))
        self.check(place <= size, "a string lies behind the table of strings")
        text = self.read_at(
            max(self.tags.get(_STRTAB, [0])) + place, min(_LONGEST, size - place)
        )
        found, end, _ = text.partition(b"\0")
        self.check(bool(end), "a string does not end")
        self._text_left -= len(found)
        self.check(
            self._text_left >= 0,
            "its strings are longer than those of any real library",
        )
        return os.fsdecode(found)
