"""ELF facts, from libraries of which tests/data/libraries/make.sh says how they were made."""

from __future__ import annotations

import io
import struct
import time
from pathlib import Path

import pytest

from patchkit.elf import Library, by_version, exports, parse_library, read_library
from patchkit.errors import SourceError

LIBRARIES = Path(__file__).parents[2] / "data" / "libraries"
GB10 = (LIBRARIES / "gb10.so").read_bytes()
TABLE = int.from_bytes(GB10[40:48], "little")  # e_shoff
COUNT, NAMES = struct.unpack_from("<HH", GB10, 60)  # e_shnum, e_shstrndx
DYNAMIC, VERSIONS, HASHES = 6, 0x6FFFFFFE, 0x6FFFFFF6  # SHT_DYNAMIC, SHT_GNU_verneed, _HASH


def test_the_facts_of_a_library():
    library = read_library(LIBRARIES / "gb10.so")
    assert (library.machine, library.soname) == ("aarch64", "libgb10.so.2")
    assert library.needed == ("libm.so.6", "libc.so.6")
    assert library.rpath == ("$ORIGIN/../lib", "/opt/nccl")
    assert library.runpath == ()
    assert library.versions == {"libm.so.6": ("GLIBC_2.29",), "libc.so.6": ("GLIBC_2.17",)}
    assert library.build_id == "10d4acfe860df65508e3b0555cd3072b549f1c49"
    sections = {section.name: section for section in library.sections}
    assert {".nv_fatbin", "__nv_relfatbin", ".dynsym", ".text"} <= sections.keys()
    assert ".bss" not in sections  # it has no contents in the file
    live = sections[".nv_fatbin"]
    assert GB10[live.offset : live.offset + 4] == b"\x50\xed\x55\xba"


def test_a_library_of_another_cpu_with_less_to_say():
    library = read_library(LIBRARIES / "archs.so")
    assert (library.machine, library.soname, library.rpath) == ("x86_64", "", ())
    assert library.needed == ("libstdc++.so.6", "libgcc_s.so.1", "libc.so.6")
    assert library.highest("GLIBC") == "GLIBC_2.2.5"
    assert library.highest("GLIBCXX") == ""


def test_the_highest_version_is_a_number_not_a_text():
    facts = dict.fromkeys(("soname", "build_id"), "") | dict.fromkeys(
        ("needed", "rpath", "runpath", "sections"), ()
    )
    versions = {
        "libc.so.6": ("GLIBC_2.17", "GLIBC_2.4", "GLIBC_PRIVATE", "GLIBC_ABI_DT_RELR"),
        "libm.so.6": ("GLIBC_2.29",),
        "libstdc++.so.6": ("GLIBCXX_3.4.9", "GLIBCXX_3.4.22", "CXXABI_1.3.9"),
    }
    library = Library(machine="aarch64", versions=versions, **facts)
    assert library.highest("GLIBC") == "GLIBC_2.29"
    assert library.highest("GLIBCXX") == "GLIBCXX_3.4.22"
    assert library.highest("GCC") == ""
    assert sorted(["V_2.10", "V_2.9", "V_2", f"V_{'9' * 5000}"], key=by_version)[:3] == [
        *("V_2", "V_2.9", "V_2.10")
    ]


def parse(data: bytes) -> Library:
    return parse_library(io.BytesIO(data), "lib.so")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not an ELF file"),
        (b"!<arch>\n", "not an ELF file"),
        (b"\x7fELF", "cannot be read"),
        (GB10[:64], "cannot be read"),
        (GB10[: len(GB10) // 2], "cannot be read"),
        (GB10[:-1], "cannot be read"),
        (GB10[:40] + bytes(8) + GB10[48:], "no section headers"),
    ],
    ids=["empty", "archive", "magic", "header", "half", "all but a byte", "no sections"],
)
def test_what_is_damaged_is_refused(data, says):
    with pytest.raises(SourceError, match=says) as caught:
        parse(data)
    assert caught.value.what.startswith("lib.so ")


def header(kind: int) -> int:
    """Where the first section header of a type is."""
    places = range(TABLE, TABLE + COUNT * 64, 64)
    return next(p for p in places if struct.unpack_from("<I", GB10, p + 4)[0] == kind)


def patched(*changes: tuple[int, str, int]) -> bytes:
    data = bytearray(GB10)
    for place, layout, value in changes:
        struct.pack_into(layout, data, place, value)
    return bytes(data)


def test_a_section_that_ends_behind_the_file_is_refused():
    place = header(1)  # SHT_PROGBITS
    with pytest.raises(SourceError, match="ends behind the end of the file"):
        parse(patched((place + 32, "<Q", len(GB10))))
    with pytest.raises(SourceError, match="ends behind the end of the file"):
        parse(patched((place + 24, "<Q", 1 << 63)))


def many_sections(kind: int) -> bytes:
    """65,000 sections that are all the same one."""
    place, table = header(kind), len(GB10)
    headers = GB10[TABLE : TABLE + COUNT * 64] + GB10[place : place + 64] * (65_000 - COUNT)
    return patched((40, "<Q", table), (60, "<H", 65_000)) + headers


def endless_versions() -> bytes:
    """A table of 2^32 - 1 libraries, each of 65,535 versions, and all of them the first one."""
    place = header(VERSIONS)
    table = struct.unpack_from("<Q", GB10, place + 24)[0]
    first = table + struct.unpack_from("<I", GB10, table + 8)[0]
    return patched(
        *((place + 44, "<I", (1 << 32) - 1), (table + 2, "<H", 65_535)),
        *((table + 12, "<I", 0), (first + 12, "<I", 0)),
    )


@pytest.mark.parametrize(
    "data",
    [
        *(many_sections(DYNAMIC), many_sections(VERSIONS), many_sections(1)),
        endless_versions(),
        # As many sections as the first one says, each of which is the first one.
        patched((60, "<H", 0), (58, "<H", 0), (TABLE + 32, "<Q", 1 << 60), (TABLE + 4, "<I", 1)),
        patched((TABLE + NAMES * 64 + 32, "<Q", 1 << 40)),
    ],
    ids=["dynamic", "versions", "sections", "endless", "one section", "names"],
)
def test_tables_that_never_end_are_refused_soon(data):
    start = time.process_time()
    with pytest.raises(SourceError, match=r"lib\.so cannot be read: "):
        parse(data)
    assert time.process_time() - start < 10


def test_a_name_without_an_end_is_refused():
    place = TABLE + NAMES * 64
    # The table of names is moved to the end of the file, where no zero follows.
    data = patched((place + 24, "<Q", len(GB10)), (place + 32, "<Q", 1 << 20)) + b"A" * (1 << 20)
    with pytest.raises(SourceError, match="cannot be read"):
        parse(data)


def test_hashes_that_never_end_are_refused_soon(tmp_path):
    """They are read where somebody asks what a library exports."""
    table = struct.unpack_from("<Q", GB10, header(HASHES) + 24)[0]
    place = tmp_path / "lib.so"
    place.write_bytes(patched((table, "<I", (1 << 32) - 1), (table + 8, "<I", (1 << 32) - 1)))
    start = time.process_time()
    with pytest.raises(SourceError, match=r"lib\.so cannot be read: "):
        exports(place, "ncclGetVersion")
    assert time.process_time() - start < 10
    assert exports(LIBRARIES / "gb10.so", "ncclGetVersion") is False
