"""Write a copy of a library with other device code; everything else keeps its address and bytes.

The new ``.nv_fatbin`` has its fat binaries at other offsets. ``.nvFatBinSegment`` points to them,
with a record of 24 bytes for each::

    u32 magic 0x466243B1, u32 version, u64 address of the fat binary, u64 address or 0

The address comes from a relocation, or from the record itself. If the new section is smaller, the
unused bytes are cut out of the file, but not out of the address space: a segment of its own loads
what follows. A larger section goes to the end of the file, in a new segment. In both cases there is
one program header more than before, and the program headers lie behind the section.
"""

import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from patchkit.elf import (
    HEADER,
    PROGRAM,
    PT_LOAD,
    SECTION,
    ElfImage,
    ProgramHeader,
)
from patchkit.errors import BuildError
from patchkit.fatbin import CONTAINER, MAGIC
from patchkit.frozen import frozen
from patchkit.wheel.device.inspect import LIVE

_RECORD = struct.Struct("<IIQQ")
_RECORD_MAGIC = 0x466243B1
_EMPTY = CONTAINER.pack(MAGIC, 1, CONTAINER.size, 0)
_RELOCATION = struct.Struct("<QQq")
# R_X86_64_RELATIVE, R_AARCH64_RELATIVE
_RELATIVE = {"x86_64": 8, "aarch64": 1027}
_SHT_RELA = 4
_PT_PHDR = 6
_PF_R = 4
_LEAST_PAGE = 1 << 12
_MOST_PAGE = 1 << 21
# Where e_phoff, e_shoff and e_phnum lie in an ELF header.
_PHOFF = 32
_SHOFF = 40
_PHNUM = 56

FatBinaries = dict[int, Sequence[bytes]]
"""The offset of each fat binary of the section in the file → its new bytes, in pieces."""


class _Tables:
    """The headers of an ELF file, and its two sections of device code."""

    def __init__(self, image: ElfImage, name: str) -> None:
        """Read the headers. Raises BuildError if the file lacks one of the two sections."""
        self.file = name
        self.relative = _RELATIVE.get(image.machine, 0)
        self.shoff = image.header.sections_offset
        self.segments = image.segments
        self.sections = image.section_headers

        by_name = dict(image.named_headers())
        for needed in (LIVE, ".nvFatBinSegment"):
            self.check(needed in by_name, f"it has no section {needed}")
        self.code = by_name[LIVE]
        self.records = by_name[".nvFatBinSegment"]

    def check(self, holds: bool, complaint: str) -> None:
        """Raise BuildError with the complaint unless ``holds``."""
        if not holds:
            raise BuildError(
                f"{self.file}: {complaint}",
                why="it was linked in a way that patchkit does not know",
                hint="its device code stays as it is; please report the library",
            )


@frozen
class _Layout:
    """The place of the new section: its ``offset`` in the new file and its ``address``.

    ``cut`` bytes before the old offset ``after`` are removed from the file. The program headers go
    to the offset ``table``.
    """

    offset: int
    address: int
    segments: Sequence[ProgramHeader]
    table: int
    cut: int = 0
    after: int = 0

    def moved(self, position: int) -> int:
        """Return the offset in the new file of a byte that is at ``position`` in the old file."""
        return position - self.cut if position >= self.after else position


def replace_device_code(source: Path, dest: Path, codes: FatBinaries) -> None:
    """Write a copy of the library ``source`` with other fat binaries to ``dest``.

    ``codes`` must have every fat binary with device code. Raises BuildError if the library is
    linked in an unknown way, SourceError if it is damaged, and OSError.
    """
    try:
        with (
            source.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as old,
        ):
            tables = _Tables(ElfImage(stream, source.name), source.name)
            _write_relinked(old, dest, tables, dict(codes))
    # The file has numbers that cannot be offsets or sizes.
    except (struct.error, ValueError, OverflowError) as error:
        raise BuildError(
            f"{source.name}: its tables contradict each other: {error}"
        ) from None
    dest.chmod(source.stat().st_mode & 0o777)


def _write_relinked(
    old: mmap.mmap,
    dest: Path,
    tables: _Tables,
    codes: FatBinaries,
) -> None:
    code = tables.code
    pointers = _find_pointers(old, tables, codes)

    size = 0
    starts = {}
    for offset in sorted(codes):
        starts[offset] = _aligned(size, max(code.alignment, 8))
        size = starts[offset] + sum(map(len, codes[offset]))
    layout = _lay_out(tables, size, len(old))

    with dest.open("xb") as new:
        new.write(memoryview(old)[: layout.after - layout.cut])
        new.write(memoryview(old)[layout.after :])
        new.seek(code.offset)
        new.write(bytes(layout.moved(code.offset + code.size) - code.offset))

        for offset, start in starts.items():
            new.seek(layout.offset + start)
            new.writelines(codes[offset])

            for position in pointers[offset]:
                _write_number(new, layout.moved(position), layout.address + start)

        _write_segments(new, tables, layout)
        _write_sections(new, tables, layout, size)


def _find_pointers(
    old: mmap.mmap,
    tables: _Tables,
    codes: FatBinaries,
) -> dict[int, list[int]]:
    """Return offset of a fat binary → the file offsets at which its address is written.

    Fat binaries without device code, which nvcc links in as well, are added to ``codes``. Raises
    BuildError.
    """
    code = tables.code
    records = tables.records
    relocated = _find_relocations(old, tables)
    pointers: dict[int, list[int]] = {offset: [] for offset in codes}
    for at in range(records.offset, records.offset + records.size, _RECORD.size):
        tables.check(at + _RECORD.size <= len(old), ".nvFatBinSegment is cut off")
        magic, _, address, _ = _RECORD.unpack_from(old, at)

        places = [at + 8] if address else []
        position = relocated.pop(records.address + at - records.offset + 8, None)
        if position is not None:
            places.append(position)

        numbers = (old[place : place + 8] for place in places)
        values = {int.from_bytes(number, "little") for number in numbers}
        value = min(values, default=0)
        offset = value - code.address + code.offset
        if offset not in codes and old[offset : offset + len(_EMPTY)] == _EMPTY:
            codes[offset] = [_EMPTY]
            pointers[offset] = []

        fits = magic == _RECORD_MAGIC and values == {value} and offset in codes
        complaint = f"the record of a fat binary at byte {at} is none that nvcc makes"
        tables.check(fits, complaint)
        pointers[offset] += places

    tables.check(not relocated, "more than its records points into its device code")
    return pointers


def _find_relocations(old: mmap.mmap, tables: _Tables) -> dict[int, int]:
    """Return the relocations to device code: address that the loader sets → offset of the value."""
    code = tables.code
    size = _RELOCATION.size
    relocated = {}
    for section in tables.sections:
        if section.kind != _SHT_RELA:
            continue

        for place in range(
            section.offset, section.offset + section.size - size + 1, size
        ):
            address, info, value = _RELOCATION.unpack_from(old, place)
            is_inside = code.address <= value < code.address + code.size
            if is_inside and info & 0xFFFFFFFF == tables.relative:
                relocated[address] = place + 16
    return relocated


def _lay_out(tables: _Tables, size: int, end: int) -> _Layout:
    """Return the layout for a section of the new size, in a file that ends at ``end`` now."""
    code = tables.code
    loads = [segment for segment in tables.segments if segment.kind == PT_LOAD]
    page = max([_LEAST_PAGE, *(segment.alignment for segment in loads)])
    is_page = page & (page - 1) == 0 and page <= _MOST_PAGE
    tables.check(is_page, f"its pages have {page} bytes")
    home = _home_segment(tables, loads)

    table = _aligned(size, 8)
    whole = table + (len(tables.segments) + 1) * PROGRAM.size
    after = (code.offset + code.size) // page * page
    cut = after - _aligned(code.offset + whole, page)
    if cut > 0:
        return _Layout(
            offset=code.offset,
            address=code.address,
            segments=_split_segments(tables, home, code.offset + whole, after, cut),
            table=code.offset + table,
            cut=cut,
            after=after,
        )
    if size <= code.size:
        return _Layout(
            offset=code.offset,
            address=code.address,
            segments=tables.segments,
            table=HEADER.size,  # program headers stay in place
        )

    offset = _aligned(end, page)
    address = _aligned(
        max(segment.address + segment.memory_size for segment in loads), page
    )
    added = ProgramHeader(PT_LOAD, _PF_R, offset, address, address, whole, whole, page)
    segments = list(tables.segments)
    # After the last PT_LOAD, since their addresses must ascend.
    segments.insert(segments.index(loads[-1]) + 1, added)
    return _Layout(
        offset=offset,
        address=address,
        segments=segments,
        table=offset + table,
    )


def _home_segment(tables: _Tables, loads: Sequence[ProgramHeader]) -> ProgramHeader:
    """Return the segment that loads the device code. Raises BuildError unless there is one."""
    code = tables.code
    homes = [
        segment
        for segment in loads
        if segment.offset <= code.offset
        and code.offset + code.size <= segment.offset + segment.size
    ]
    tables.check(len(homes) == 1, "its device code is not in one segment")
    (home,) = homes
    is_at_home = code.address - home.address == code.offset - home.offset
    tables.check(is_at_home, "its sections and segments contradict each other")
    return home


def _split_segments(
    tables: _Tables,
    home: ProgramHeader,
    end: int,
    after: int,
    cut: int,
) -> list[ProgramHeader]:
    """Return all segments, with ``home`` split in two.

    The first part ends at ``end``, the second begins at ``after``; both are offsets in the old
    file, from which ``cut`` bytes before ``after`` are removed.
    """
    used = end - home.offset
    skipped = after - home.offset
    start = home._replace(size=used, memory_size=used)
    tail = home._replace(
        offset=after - cut,
        address=home.address + skipped,
        physical_address=home.physical_address + skipped,
        size=home.size - skipped,
        memory_size=home.memory_size - skipped,
    )

    segments: list[ProgramHeader] = []
    for segment in tables.segments:
        if segment == home:
            segments += [start, tail]
        elif segment.offset >= after:
            segments.append(segment._replace(offset=segment.offset - cut))
        else:
            segments.append(segment)
    return segments


def _write_segments(new: IO[bytes], tables: _Tables, layout: _Layout) -> None:
    """Write the program headers, and their offset into the ELF header, if there are more now."""
    count = len(layout.segments)
    if count == len(tables.segments):
        return

    length = count * PROGRAM.size
    address = layout.address + layout.table - layout.offset
    new.seek(layout.table)
    for segment in layout.segments:
        if segment.kind == _PT_PHDR:
            segment = segment._replace(
                offset=layout.table,
                address=address,
                physical_address=address,
                size=length,
                memory_size=length,
            )
        new.write(PROGRAM.pack(*segment))

    _write_number(new, _PHOFF, layout.table)
    _write_number(new, _PHNUM, count, width=2)


def _write_sections(
    new: IO[bytes],
    tables: _Tables,
    layout: _Layout,
    size: int,
) -> None:
    """Write the section headers, and their offset into the ELF header."""
    shoff = layout.moved(tables.shoff)
    _write_number(new, _SHOFF, shoff)

    new.seek(shoff)
    for section in tables.sections:
        changed = section._replace(offset=layout.moved(section.offset))
        if section is tables.code:
            changed = section._replace(
                offset=layout.offset,
                address=layout.address,
                size=size,
            )
        new.write(SECTION.pack(*changed))


def _write_number(
    new: IO[bytes],
    place: int,
    number: int,
    width: int = 8,
) -> None:
    new.seek(place)
    new.write(number.to_bytes(width, "little"))


def _aligned(number: int, to: int) -> int:
    return (number + to - 1) // to * to
