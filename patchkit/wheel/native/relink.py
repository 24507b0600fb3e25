"""Write a library anew with other device code; all else keeps its address and its bytes.

``.nv_fatbin`` is packed anew, so that its fat binaries move. What points to them is
``.nvFatBinSegment``, a record of 24 bytes for each::

    u32 magic 0x466243B1, u32 version, u64 address of the fat binary, u64 address or 0

The loader fills the address in, from a relocation or from what lies there. What a smaller section
leaves is cut out of the file and not out of the address space: what follows is loaded by a segment
of its own. A larger section goes behind everything, in a new segment. Either way the program
headers, one more than before, lie behind the section.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import IO

from patchkit.elf import HEADER, PROGRAM, PT_LOAD, SECTION
from patchkit.errors import BuildError
from patchkit.wheel.device.fatbin import CONTAINER, MAGIC

_RECORD, _RECORD_MAGIC = struct.Struct("<IIQQ"), 0x466243B1
_EMPTY = CONTAINER.pack(MAGIC, 1, CONTAINER.size, 0)
_RELOCATION = struct.Struct("<QQq")
_RELATIVE = {62: 8, 183: 1027}  # e_machine → R_X86_64_RELATIVE, R_AARCH64_RELATIVE
_SHT_RELA, _PT_PHDR, _PF_R = 4, 6, 4
_LEAST_PAGE, _MOST_PAGE = 1 << 12, 1 << 21
# Where e_phoff, e_shoff and e_phnum lie in an ELF header.
_PHOFF, _SHOFF, _PHNUM = 32, 40, 56

FatBinaries = Mapping[int, Sequence[bytes]]
"""The offset of each fat binary of the section in the file → its new bytes, in pieces."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A program header, with the fields of Elf64_Phdr in their order."""

    kind: int
    flags: int
    offset: int
    address: int
    physical: int
    stored: int
    size: int
    align: int


@dataclass(frozen=True, slots=True)
class _Section:
    """A section header, with the fields of Elf64_Shdr in their order."""

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry: int


class _Tables:
    """The tables of an ELF file."""

    def __init__(self, old: mmap.mmap, name: str) -> None:
        """Read them. Raises BuildError for a file without the two sections."""
        self.file = name
        _, _, machine, _, _, phoff, self.shoff, _, _, _, phnum, _, shnum, shstrndx = (
            HEADER.unpack_from(old)
        )
        self.relative = _RELATIVE.get(machine, 0)
        ends = (phoff + phnum * PROGRAM.size, self.shoff + shnum * SECTION.size)
        self.check(
            max(ends) <= len(old) and shstrndx < shnum, "its tables end behind the file"
        )
        programs, headers = old[phoff : ends[0]], old[self.shoff : ends[1]]
        self.segments = [_Segment(*fields) for fields in PROGRAM.iter_unpack(programs)]
        self.sections = [_Section(*fields) for fields in SECTION.iter_unpack(headers)]
        names = self.sections[shstrndx].offset
        found = {}
        for section in self.sections:
            start = names + section.name
            found[old[start : old.find(b"\0", start)]] = section
        for needed in (b".nv_fatbin", b".nvFatBinSegment"):
            self.check(needed in found, f"it has no section {needed.decode()}")
        self.code, self.records = found[b".nv_fatbin"], found[b".nvFatBinSegment"]

    def check(self, holds: bool, complaint: str) -> None:
        """Raise BuildError unless it holds."""
        if not holds:
            raise BuildError(
                f"{self.file}: {complaint}",
                why="it was linked in a way that patchkit does not know",
                hint="its device code stays as it is; please report the library",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Where the new section goes: its ``offset`` in the new file, its ``address``.

    ``cut`` bytes in front of the old offset ``after`` leave the file. ``table`` is where the
    program headers go.
    """

    offset: int
    address: int
    segments: Sequence[_Segment]
    table: int
    cut: int = 0
    after: int = 0


def replace_device_code(source: Path, dest: Path, codes: FatBinaries) -> None:
    """Write ``source`` as ``dest`` with these fat binaries; ``codes`` has to have every one.

    Raises BuildError if the library is not what nvcc and a linker make, OSError.
    """
    try:
        with (
            source.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as old,
        ):
            tables, codes = _Tables(old, source.name), dict(codes)
            pointers = _find_pointers(old, tables, codes)
            code, size, starts = tables.code, 0, {}
            for offset in sorted(codes):
                starts[offset] = _aligned(size, max(code.align, 8))
                size = starts[offset] + sum(map(len, codes[offset]))
            layout = _lay_out(tables, size, len(old))

            def moved(position: int) -> int:
                return position - (layout.cut if position >= layout.after else 0)

            with dest.open("xb") as new:
                new.write(memoryview(old)[: layout.after - layout.cut])
                new.write(memoryview(old)[layout.after :])
                new.seek(code.offset)
                new.write(bytes(moved(code.offset + code.size) - code.offset))
                for offset, start in starts.items():
                    new.seek(layout.offset + start)
                    new.writelines(codes[offset])
                    value = layout.address + start
                    for position in pointers[offset]:
                        new.seek(moved(position))
                        new.write(value.to_bytes(8, "little"))
                _write_tables(new, tables, layout, size, moved)
    except (
        struct.error,
        ValueError,
        OverflowError,
    ) as error:  # numbers that no file can hold
        raise BuildError(
            f"{source.name}: its tables contradict each other: {error}"
        ) from None
    dest.chmod(source.stat().st_mode & 0o777)


def _find_pointers(
    old: mmap.mmap, tables: _Tables, codes: dict[int, Sequence[bytes]]
) -> dict[int, list[int]]:
    """Return where in the file the address of each fat binary stands.

    Fat binaries without device code, which nvcc links in as well, are added to ``codes``. Raises
    BuildError.
    """
    code, records = tables.code, tables.records
    known = {code.address + offset - code.offset: offset for offset in codes}
    relocated = {}  # address that the loader fills in → position of the value
    for section in tables.sections:
        if section.kind == _SHT_RELA:
            entries = old[section.offset : section.offset + section.size // 24 * 24]
            for number, (place, info, value) in enumerate(
                _RELOCATION.iter_unpack(entries)
            ):
                inside = code.address <= value < code.address + code.size
                if inside and info & 0xFFFFFFFF == tables.relative:
                    relocated[place] = section.offset + number * 24 + 16
    found: dict[int, list[int]] = {offset: [] for offset in codes}
    for at in range(records.offset, records.offset + records.size, _RECORD.size):
        tables.check(at + _RECORD.size <= len(old), ".nvFatBinSegment is cut off")
        magic, _, address, _ = _RECORD.unpack_from(old, at)
        position = relocated.pop(records.address + at - records.offset + 8, None)
        places = [
            *([at + 8] if address else []),
            *([] if position is None else [position]),
        ]
        values = {int.from_bytes(old[place : place + 8], "little") for place in places}
        value = min(values, default=0)
        offset = value - code.address + code.offset
        if value not in known and old[offset : offset + len(_EMPTY)] == _EMPTY:
            codes[offset], known[value], found[offset] = [_EMPTY], offset, []
        fits = magic == _RECORD_MAGIC and values == {value} and value in known
        tables.check(
            fits, f"the record of a fat binary at byte {at} is none that nvcc makes"
        )
        found[offset] += places
    tables.check(not relocated, "more than its records points into its device code")
    return found


def _lay_out(tables: _Tables, size: int, end: int) -> _Layout:
    """Decide where a section of the new size goes, in a file that now ends at ``end``."""
    code, segments = tables.code, tables.segments
    loads = [segment for segment in segments if segment.kind == PT_LOAD]
    page = max([_LEAST_PAGE, *(segment.align for segment in loads)])
    tables.check(
        page & (page - 1) == 0 and page <= _MOST_PAGE, f"its pages have {page} bytes"
    )
    stop = code.offset + code.size
    homes = [
        s for s in loads if s.offset <= code.offset and stop <= s.offset + s.stored
    ]
    tables.check(len(homes) == 1, "its device code is not in one segment")
    (home,) = homes
    at_home = code.address - home.address == code.offset - home.offset
    tables.check(at_home, "its sections and segments contradict each other")
    table = _aligned(size, 8)
    whole = table + (len(segments) + 1) * PROGRAM.size
    first, last = _aligned(code.offset + whole, page), stop // page * page
    if first < last:
        used, rest = code.offset + whole - home.offset, last - home.offset
        start = replace(home, stored=used, size=used)
        tail = replace(
            home,
            offset=first,
            address=home.address + rest,
            physical=home.physical + rest,
            stored=home.stored - rest,
            size=home.size - rest,
        )
        cut = last - first
        others = {
            s: replace(s, offset=s.offset - cut) for s in segments if s.offset >= last
        }
        changed: list[_Segment] = []
        for segment in segments:
            changed += (
                [start, tail] if segment == home else [others.get(segment, segment)]
            )
        return _Layout(
            offset=code.offset,
            address=code.address,
            segments=changed,
            table=code.offset + table,
            cut=cut,
            after=last,
        )
    if size <= code.size:
        place = HEADER.size  # they stay where they are
        return _Layout(
            offset=code.offset, address=code.address, segments=segments, table=place
        )
    offset = _aligned(end, page)
    address = _aligned(max(segment.address + segment.size for segment in loads), page)
    added = _Segment(PT_LOAD, _PF_R, offset, address, address, whole, whole, page)
    behind = (
        max(
            number for number, segment in enumerate(segments) if segment.kind == PT_LOAD
        )
        + 1
    )
    segments = [*segments[:behind], added, *segments[behind:]]
    return _Layout(
        offset=offset, address=address, segments=segments, table=offset + table
    )


def _write_tables(
    new: IO[bytes],
    tables: _Tables,
    layout: _Layout,
    size: int,
    moved: Callable[[int], int],
) -> None:
    """Write program headers, section headers, and what the ELF header says of both."""
    grown = len(layout.segments) > len(tables.segments)
    if grown:
        length = len(layout.segments) * PROGRAM.size
        address = layout.address + layout.table - layout.offset
        new.seek(layout.table)
        for segment in layout.segments:
            if segment.kind == _PT_PHDR:
                place = {
                    "offset": layout.table,
                    "address": address,
                    "physical": address,
                }
                segment = replace(segment, **place, stored=length, size=length)
            new.write(PROGRAM.pack(*astuple(segment)))
        for place_of, value, width in (
            (_PHOFF, layout.table, 8),
            (_PHNUM, len(layout.segments), 2),
        ):
            new.seek(place_of)
            new.write(value.to_bytes(width, "little"))
    new.seek(_SHOFF)
    new.write(moved(tables.shoff).to_bytes(8, "little"))
    new.seek(moved(tables.shoff))
    for section in tables.sections:
        changed = replace(section, offset=moved(section.offset))
        if section is tables.code:
            changed = replace(
                section, offset=layout.offset, address=layout.address, size=size
            )
        new.write(SECTION.pack(*astuple(changed)))


def _aligned(number: int, to: int) -> int:
    return (number + to - 1) // to * to
