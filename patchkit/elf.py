"""Read ELF files: their machine, the libraries that they need, and their sections.

Needed libraries are found through the program headers, as the dynamic loader finds them. Sections
are for tools, and a file may have none. Every table has a limit: a hostile file raises SourceError
after milliseconds and a few MiB. Nodes run this module, so it needs the standard library alone.
"""

import io
import os
import re
import struct
from collections import defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from functools import cached_property
from io import BufferedIOBase
from itertools import chain
from pathlib import Path

from patchkit.errors import SourceError
from patchkit.frozen import Fields, Texts, frozen, positional

MAGIC = b"\x7fELF"
_LITTLE_64 = b"\x02\x01"  # EI_CLASS and EI_DATA: 64 bits, little-endian
# In their order: Elf64_Ehdr, Elf64_Phdr, Elf64_Shdr, Elf64_Dyn, Elf64_Verneed and Elf64_Vernaux of
# elf.h.
HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
PROGRAM = struct.Struct("<IIQQQQQQ")
SECTION = struct.Struct("<IIQQQQIIQQ")
_ENTRY = struct.Struct("<qQ")
_NEED = struct.Struct("<HHIII")
_NEEDED_VERSION = struct.Struct("<IHHII")

# e_machine → the machine's name in `uname -m`. Other machines are shown by their number.
_MACHINES = {
    62: "x86_64",
    183: "aarch64",
    21: "ppc64le",
    243: "riscv64",
    258: "loongarch64",
    190: "cuda",
}
_LOADABLE = (2, 3)  # ET_EXEC, ET_DYN
PT_LOAD = 1
_PT_DYNAMIC = 2
# Tags of entries in the dynamic section: DT_NULL, DT_NEEDED, …
_NULL = 0
_NEEDED = 1
_STRTAB = 5
_STRSZ = 10
_SONAME = 14
_RPATH = 15
_RUNPATH = 29
_VERNEED = 0x6FFFFFFE
_SHT_NULL = 0
_SHT_STRTAB = 3
_SHT_NOBITS = 8
_SHN_XINDEX = 0xFFFF  # e_shstrndx if the number of sections needs more than 16 bits

# Limits that no real library reaches.
_MOST_PROGRAMS = 512  # program headers
_MOST_ENTRIES = 4096  # entries of the dynamic section
_LONGEST = 65536  # bytes of a string
_MOST_TEXT = 1 << 20  # bytes of all strings
_MOST_VERSIONS = 4096  # symbol versions
# Device code has some sections for each kernel, with names of kilobytes.
_MOST_SECTIONS = 1 << 18
_MOST_NAMES = 1 << 25  # bytes of all names


# An Elf64_Ehdr. Offsets are in the file; program_size and section_size are those of one header.
_FileHeader = namedtuple(
    "_FileHeader",
    "identity kind machine version entry programs_offset sections_offset flags header_size "
    "program_size program_count section_size section_count section_of_names",
)
# An Elf64_Phdr: a part of the file that the loader maps to an address.
ProgramHeader = namedtuple(
    "ProgramHeader",
    "kind flags offset address physical_address size memory_size alignment",
)
# An Elf64_Shdr; ``name`` is an offset in the section of names.
SectionHeader = namedtuple(
    "SectionHeader",
    "name kind flags address offset size link info alignment entry_size",
)


@positional
class Section:
    """A section with contents in the file: ``size`` bytes from ``offset`` on."""

    name: str
    offset: int
    size: int


@frozen
class Dynamic:
    """What a file tells the dynamic loader; a field is empty if the file lacks it.

    ``machine`` is the name in `uname -m`, or ``cuda`` for device code. ``needed`` are the names of
    libraries, ``rpath`` and ``runpath`` folders.
    """

    machine: str
    soname: str = ""
    needed: Texts = ()
    rpath: Texts = ()
    runpath: Texts = ()


@frozen
class Library(Dynamic):
    """What a file tells the loader, its sections, and the symbol versions that it needs.

    ``versions`` maps a needed library to symbol versions (``GLIBC_2.34``), lowest first.
    """

    versions: Mapping[str, Texts]
    sections: tuple[Section, ...]

    def highest(self, family: str) -> str:
        """Return the highest symbol version of a family that the file needs: ``GLIBC_2.34``.

        A distribution that only has older ones cannot load the file. Return "" for none.
        """
        numbered = re.compile(rf"{re.escape(family)}_\d[\d.]*")
        names = filter(numbered.fullmatch, chain.from_iterable(self.versions.values()))
        return max(names, key=by_version, default="")


def read_dynamic(path: Path) -> Dynamic:
    """Return what a program or a library tells the loader.

    Raises SourceError for another or a damaged file, OSError if it cannot be read.
    """
    with path.open("rb") as stream:
        image = ElfImage(stream, str(path))
        image.check(image.is_loadable, "it is neither a program nor a shared library")
        return Dynamic(**image.dynamic_fields())


def parse_library(stream: BufferedIOBase, name: str) -> Library:
    """Return all facts of an open ELF file. ``name`` is its name in errors.

    Of an object file, most fields are empty. Raises SourceError if it is not ELF or damaged,
    OSError if it cannot be read.
    """
    image = ElfImage(stream, name)
    sections = tuple(
        Section(title, header.offset, header.size)
        for title, header in image.named_headers()
    )
    versions = {
        library: tuple(sorted(names, key=by_version))
        for library, names in image.needed_versions().items()
    }
    return Library(**image.dynamic_fields(), versions=versions, sections=sections)


def by_version(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts ``GLIBC_2.4`` before ``GLIBC_2.17``."""
    # Numbers are cut into parts of nine digits, since int() is slow, or refuses, for the long ones
    # of a hostile file.
    parts = re.findall(r"\d{1,9}|\D+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def damaged(name: str, what: str) -> SourceError:
    """Return the error for a file ``name`` whose bytes contradict their format."""
    return SourceError(
        f"{name} cannot be read: {what}",
        why="the file is cut short or damaged, or it was made to mislead",
        hint="download or build it again, and compare its sha256",
    )


class ElfImage:
    """An open ELF file, read by offsets in it or by addresses in memory.

    The program headers say at which address each part of the file is loaded.
    """

    def __init__(self, stream: BufferedIOBase, name: str) -> None:
        self._stream = stream
        self._name = name
        # Bytes of strings that may still be copied. The table's size is no limit: many entries may
        # name one long string.
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
        is_known = header[4:6] == _LITTLE_64
        self.check(is_known, "it is not for a 64-bit little-endian machine")

        self.header = _FileHeader._make(HEADER.unpack(header))
        number = self.header.machine
        self.machine = _MACHINES.get(number, str(number))

    @property
    def is_loadable(self) -> bool:
        """Return whether the file is a program or a shared library."""
        return self.header.kind in _LOADABLE

    def check(self, holds: bool, what: str) -> None:
        """Raise SourceError with the text ``what`` unless the condition ``holds``."""
        if not holds:
            raise damaged(self._name, what)

    def limit(self, size: int, most: int, what: str) -> None:
        """Raise SourceError if ``size`` is above ``most``, which no real library reaches."""
        self.check(size <= most, f"{what} than any real library")

    def read(self, offset: int, length: int) -> bytes:
        """Return the bytes at an offset of the file. Raises SourceError if there are fewer."""
        is_inside = offset + length <= self._size
        self.check(is_inside, "a table ends behind the end of the file")
        self._stream.seek(offset)
        data = self._stream.read(length)
        self.check(len(data) == length, "it became shorter meanwhile")
        return data

    def named_headers(self) -> Iterator[tuple[str, SectionHeader]]:
        """Yield name and header of each section that has contents.

        Raises SourceError if there are no sections.
        """
        headers = self.section_headers
        names = self.header.section_of_names
        if names == _SHN_XINDEX and headers:
            names = headers[0].link
        is_table = names < len(headers) and headers[names].kind == _SHT_STRTAB
        self.check(is_table, "its sections have no names")
        table = headers[names]
        self.check(table.size <= _MOST_NAMES, "the names of its sections are too long")
        text = self.read(table.offset, table.size)

        # The sum of the names is limited, too, since many sections may share one long name.
        budget = _MOST_NAMES
        for header in headers:
            if header.kind in (_SHT_NULL, _SHT_NOBITS):
                continue

            end = text.find(b"\0", header.name)
            self.check(end >= 0, "the name of a section does not end")
            budget -= end - header.name
            self.check(budget >= 0, "the names of its sections are too long")

            name = os.fsdecode(text[header.name : end])
            is_inside = header.offset + header.size <= self._size
            problem = f"the section {name!r} ends behind the end of the file"
            self.check(is_inside, problem)
            yield name, header

    @cached_property
    def section_headers(self) -> list[SectionHeader]:
        """Return the headers of all sections."""
        place = self.header.sections_offset
        size = self.header.section_size
        count = self.header.section_count
        problem = "it has no section headers, so nobody can say what it holds"
        self.check(place > 0, problem)
        self.check(size == SECTION.size, "its section headers have another size")

        # A number that needs more than 16 bits is the size in the first section header.
        if not count:
            first_header = SectionHeader._make(SECTION.unpack(self.read(place, size)))
            count = first_header.size

        self.limit(count, _MOST_SECTIONS, "it has more sections")
        data = self.read(place, count * size)
        return list(map(SectionHeader._make, SECTION.iter_unpack(data)))

    @cached_property
    def segments(self) -> list[ProgramHeader]:
        """Return the program headers; none for an object file or device code."""
        count = self.header.program_count
        # NVIDIA's device code is also ELF, but the system's loader does not load it.
        if not self.is_loadable or self.machine == "cuda" or not count:
            return []

        size = self.header.program_size
        self.check(size == PROGRAM.size, "its program headers have another size")
        self.limit(count, _MOST_PROGRAMS, "it has more program headers")
        data = self.read(self.header.programs_offset, size * count)
        return list(map(ProgramHeader._make, PROGRAM.iter_unpack(data)))

    @cached_property
    def tags(self) -> Mapping[int, list[int]]:
        """Return the values of the dynamic section by tag."""
        tags: dict[int, list[int]] = defaultdict(list)
        for segment in self.segments:
            if segment.kind != _PT_DYNAMIC:
                continue

            # Of a longer section only the limit is read: then the check below fails.
            count = min(segment.size // _ENTRY.size, _MOST_ENTRIES)
            data = self.read(segment.offset, count * _ENTRY.size)
            for tag, value in _ENTRY.iter_unpack(data):
                if tag == _NULL:
                    return tags
                tags[tag].append(value)
            self.check(False, "its dynamic section does not end")
        return tags

    def needed_versions(self) -> Mapping[str, set[str]]:
        """Return library → the symbol versions that the file needs from it."""
        versions: dict[str, set[str]] = {}
        # One limit for all chains, since the chains of a hostile file may overlap.
        count = 0
        address = max(self.tags.get(_VERNEED, [0]))
        while address:
            data = self.read_at(address, _NEED.size)
            _, _, library, offset, following = _NEED.unpack(data)
            names = versions.setdefault(self.string(library), set())
            place = address + offset

            while place:
                count += 1
                self.limit(count, _MOST_VERSIONS, "it needs more symbol versions")
                data = self.read_at(place, _NEEDED_VERSION.size)
                *_, text, distance = _NEEDED_VERSION.unpack(data)
                names.add(self.string(text))
                place = distance and place + distance
            address = following and address + following
        return versions

    def dynamic_fields(self) -> Fields:
        """Return the fields of ``Dynamic``."""
        return {
            "machine": self.machine,
            "soname": "".join(self._strings(_SONAME)),
            "needed": tuple(self._strings(_NEEDED)),
            "rpath": self._folders(_RPATH),
            "runpath": self._folders(_RUNPATH),
        }

    def _strings(self, tag: int) -> list[str]:
        return [self.string(place) for place in self.tags.get(tag, ())]

    def _folders(self, tag: int) -> Texts:
        paths = ":".join(self._strings(tag))
        return tuple(filter(None, paths.split(":")))

    def read_at(self, address: int, length: int) -> bytes:
        """Return the bytes that the loader puts at an address, or raise SourceError."""
        for segment in self.segments:
            start = address - segment.address
            is_inside = start >= 0 and start + length <= segment.size
            if segment.kind == PT_LOAD and is_inside:
                return self.read(segment.offset + start, length)
        raise damaged(self._name, f"nothing is loaded at {address:#x}")

    def string(self, place: int) -> str:
        """Return the string at an offset in the table of strings.

        Raises SourceError if it lies outside the table or does not end.
        """
        size = max(self.tags.get(_STRSZ, [0]))
        self.check(place <= size, "a string lies behind the table of strings")
        table = max(self.tags.get(_STRTAB, [0]))
        data = self.read_at(table + place, min(_LONGEST, size - place))

        text, end, _ = data.partition(b"\0")
        self.check(bool(end), "a string does not end")

        self._text_left -= len(text)
        is_real = self._text_left >= 0
        self.check(is_real, "its strings are longer than those of any real library")
        return os.fsdecode(text)
