"""What an ELF file says of itself: for which machine, what it needs, where its sections lie.

pyelftools reads it, through a stream that gives out only so much: whatever loops or sizes a hostile
file makes up, each of them has to read, and so comes to an end.
"""

from __future__ import annotations

import errno
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import IO, TypeVar, cast

from elftools.common.utils import struct_parse
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.hash import ELFHashSection, GNUHashSection
from elftools.elf.sections import NoteSection, StringTableSection

from patchkit.errors import SourceError

T = TypeVar("T")

MAGIC = b"\x7fELF"
# Each header of a section takes 11 reads, of 64 bytes or less.
_MOST_READS = 500_000
_LONGEST_READ = 1 << 16
_OPENED = ("SHT_DYNAMIC", "SHT_GNU_verneed", "SHT_NOTE")
_HASHES = ("SHT_GNU_HASH", "SHT_HASH")
_BUILD_ID = ".note.gnu.build-id"


@dataclass(frozen=True, slots=True)
class Section:
    """A section with contents in the file; ``offset`` and ``size`` in bytes."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The facts of an ELF file; empty where it has none, as an object file has no soname.

    ``machine`` is named as uname names it: ``aarch64``, ``x86_64``. ``versions`` are the symbol
    versions that it needs (``GLIBC_2.34``) of each needed library. ``build_id`` is in hex.
    """

    machine: str
    soname: str
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]
    versions: Mapping[str, tuple[str, ...]]
    build_id: str
    sections: tuple[Section, ...]

    def highest(self, family: str) -> str:
        """The highest version that it needs of ``GLIBC``, ``GLIBCXX``, …; empty if it needs none.

        It decides on which distributions the file can be loaded.
        """
        numbered = re.compile(rf"{re.escape(family)}_\d[\d.]*")
        names = {name for needed in self.versions.values() for name in needed}
        return max(filter(numbered.fullmatch, names), key=by_version, default="")


def read_library(path: Path) -> Library:
    """The facts of a file. Raises SourceError if it is no ELF file, or damaged."""
    with path.open("rb") as stream:
        return parse_library(stream, str(path))


def exports(path: Path, symbol: str) -> bool:
    """Whether a library defines a symbol for others. Raises SourceError as ``read_library``."""
    with path.open("rb") as stream:
        return _parsed(stream, str(path), lambda elf, _size: _defines(elf, symbol))


def parse_library(stream: BufferedIOBase, name: str) -> Library:
    """The facts of an open file; errors call it ``name``."""
    return _parsed(stream, name, _library)


def _parsed(stream: BufferedIOBase, name: str, ask: Callable[[ELFFile, int], T]) -> T:
    """What ``ask`` makes of the file and its size in bytes."""
    stream.seek(0)
    if stream.read(4) != MAGIC:
        raise SourceError(
            f"{name} is not an ELF file", hint="give a shared library of Linux, or a wheel"
        )
    try:
        rationed = cast("IO[bytes]", _Rationed(stream))
        return ask(ELFFile(rationed), stream.seek(0, io.SEEK_END))
    except Exception as error:  # damage surfaces anywhere in the parser, as anything
        if failed_disk(error):
            raise
        raise damaged(name, str(error) or type(error).__name__) from error


def damaged(name: str, what: str) -> SourceError:
    """The error for bytes that contradict the format."""
    return SourceError(
        f"{name} cannot be read: {what}",
        why="the file is cut short or damaged, or it was made to mislead",
        hint="download or build it again, and compare its sha256",
    )


def failed_disk(error: Exception) -> bool:
    """Whether reading failed, and not for a position that damaged headers made up."""
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


class _Rationed:
    """A stream that refuses the read that is one too many, or too long, with a ValueError."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream = stream
        self._left = _MOST_READS

    def read(self, size: int = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0 or not 0 <= size <= _LONGEST_READ:
            raise ValueError("its tables are larger than those of any real library")
        return self._stream.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()


def _library(elf: ELFFile, size: int) -> Library:
    dynamic: dict[str, list[str]] = {}
    versions: dict[str, tuple[str, ...]] = {}
    build_id = ""
    sections = []
    for number, kind, section in _sections(elf):
        if section.offset + section.size > size:
            raise ValueError(f"the section {section.name!r} ends behind the end of the file")
        sections.append(section)
        # No other section is opened: of symbol hashes the parser would read every number.
        if kind not in _OPENED:
            continue
        contents = elf.get_section(number)
        if isinstance(contents, DynamicSection):
            dynamic = _dynamic(contents)
        elif isinstance(contents, GNUVerNeedSection):
            versions = _versions(contents)
        elif isinstance(contents, NoteSection) and section.name == _BUILD_ID:
            build_id = _build_id(contents)
    return Library(
        machine=str(elf["e_machine"]).removeprefix("EM_").lower(),
        soname="".join(dynamic.get("soname", ())),
        needed=tuple(dynamic.get("needed", ())),
        rpath=_folders(dynamic.get("rpath", [])),
        runpath=_folders(dynamic.get("runpath", [])),
        versions=versions,
        build_id=build_id,
        sections=tuple(sections),
    )


def _defines(elf: ELFFile, symbol: str) -> bool:
    for number, kind, _section in _sections(elf):
        if kind in _HASHES:
            table = elf.get_section(number)
            assert isinstance(table, (GNUHashSection, ELFHashSection))
            found = table.get_symbol(symbol)
            return found is not None and found["st_shndx"] != "SHN_UNDEF"
    return False


def _sections(elf: ELFFile) -> Iterator[tuple[int, str, Section]]:
    """The number and type of each section that has contents in the file."""
    names = elf.get_section(elf.get_shstrndx()) if elf.num_sections() else None
    if not isinstance(names, StringTableSection):
        raise ValueError("it has no section headers, so nobody can say what it holds")
    for number in range(elf.num_sections()):
        place = elf["e_shoff"] + number * elf["e_shentsize"]
        header = struct_parse(elf.structs.Elf_Shdr, elf.stream, place)
        if header.sh_type not in ("SHT_NOBITS", "SHT_NULL"):
            name = names.get_string(header.sh_name)
            yield number, header.sh_type, Section(name, header.sh_offset, header.sh_size)


def _dynamic(section: DynamicSection) -> dict[str, list[str]]:
    """The strings of the dynamic section: soname, needed, rpath and runpath."""
    found: dict[str, list[str]] = {}
    for tag in section.iter_tags():
        key = str(tag.entry.d_tag).removeprefix("DT_").lower()
        if key in ("soname", "needed", "rpath", "runpath"):
            found.setdefault(key, []).append(getattr(tag, key))
    return found


def _folders(paths: list[str]) -> tuple[str, ...]:
    return tuple(folder for path in paths for folder in path.split(":") if folder)


def _versions(section: GNUVerNeedSection) -> dict[str, tuple[str, ...]]:
    """The symbol versions by library, lowest first."""
    found: dict[str, set[str]] = {}
    for library, needed in section.iter_versions():
        found.setdefault(str(library.name), set()).update(version.name for version in needed)
    return {library: tuple(sorted(names, key=by_version)) for library, names in found.items()}


def by_version(name: str) -> list[tuple[int, str]]:
    """Sorts ``GLIBC_2.4`` before ``GLIBC_2.17``."""
    parts = re.findall(r"\d{1,9}|\D+|\d+", name)
    return [
        (int(part), "") if len(part) < 10 and part.isdecimal() else (-1, part) for part in parts
    ]


def _build_id(section: NoteSection) -> str:
    notes = (n for n in section.iter_notes() if n["n_type"] == "NT_GNU_BUILD_ID")
    return next((str(note["n_desc"]) for note in notes), "")
