"""ELF facts, of libraries that tests/data/libraries/make.sh describes, and beside pyelftools."""

import contextlib
import io
import struct
import sys
import sysconfig
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkit.elf import (
    Dynamic,
    Library,
    Section,
    by_version,
    parse_library,
    read_dynamic,
)
from patchkit.errors import SourceError
from support.layout import link

LIBRARIES = Path(__file__).parents[2] / "data" / "libraries"
GB10 = (LIBRARIES / "gb10.so").read_bytes()
PROGRAMS = struct.unpack_from("<Q", GB10, 32)[0]
PROGRAM_COUNT = struct.unpack_from("<H", GB10, 56)[0]
TABLE = int.from_bytes(GB10[40:48], "little")  # e_shoff
COUNT, NAMES = struct.unpack_from("<HH", GB10, 60)  # e_shnum, e_shstrndx
LOAD, DYNAMIC = 1, 2
SOURCE = "int defined(void) { return 1; } int needed(void); int call(void) { return needed(); }"


def test_the_highest_version_is_a_number_not_a_text():
    versions = {
        "libc.so.6": ("GLIBC_2.17", "GLIBC_2.4", "GLIBC_PRIVATE", "GLIBC_ABI_DT_RELR"),
        "libm.so.6": ("GLIBC_2.29",),
    }
    library = Library(machine="aarch64", versions=versions, sections=())
    assert (library.highest("GLIBC"), library.highest("GCC")) == ("GLIBC_2.29", "")
    texts = ["V_2.10", "V_2.9", f"V_{'9' * 5000}"]
    assert sorted(texts, key=by_version)[:2] == ["V_2.9", "V_2.10"]


# The same files, read by pyelftools


def by_pyelftools(path):
    """The facts of a library."""
    tags, versions, sections = defaultdict(list), {}, []
    with path.open("rb") as stream:
        file = ELFFile(stream)
        for section in file.iter_sections():
            if section["sh_type"] not in ("SHT_NOBITS", "SHT_NULL"):
                sections.append(
                    Section(section.name, section["sh_offset"], section["sh_size"])
                )
            if isinstance(section, DynamicSection):
                for tag in section.iter_tags():
                    key = tag.entry.d_tag.removeprefix("DT_").lower()
                    tags[key].append(getattr(tag, key, ""))
            elif isinstance(section, GNUVerNeedSection):
                for library, needed in section.iter_versions():
                    names = versions.setdefault(library.name, set())
                    names.update(version.name for version in needed)
        return Library(
            machine=file["e_machine"].removeprefix("EM_").lower(),
            soname="".join(tags["soname"]),
            needed=tuple(tags["needed"]),
            rpath=tuple(filter(None, ":".join(tags["rpath"]).split(":"))),
            runpath=tuple(filter(None, ":".join(tags["runpath"]).split(":"))),
            versions={
                name: tuple(sorted(each, key=by_version))
                for name, each in versions.items()
            },
            sections=tuple(sections),
        )


def assert_as_pyelftools(place):
    library = by_pyelftools(place)
    assert parse(place.read_bytes()) == library, place
    found = asdict(read_dynamic(place))
    assert found == {name: getattr(library, name) for name in found}, place


def test_a_library_as_pyelftools_reads_it(tmp_path):
    base = link(
        tmp_path / "libbase.so", "int needed(void) { return 2; }", soname="libbase.so.1"
    )
    how = {"needs": [base], "path": "/a:/b", "tags": "--enable-new-dtags"}
    place = link(tmp_path / "lib.so", SOURCE, soname="lib.so.3", **how)
    assert (read_dynamic(place).rpath, read_dynamic(place).runpath) == (
        (),
        ("/a", "/b"),
    )
    assert_as_pyelftools(place)


def test_every_library_of_this_python_as_pyelftools_reads_it():
    folders = {sysconfig.get_path("platlib"), sysconfig.get_path("platstdlib")}
    found = [
        path
        for folder in folders
        for path in Path(folder).rglob("*.so*")
        if path.is_file()
    ]
    places = sorted(found)[::4]  # all of them take a quarter of a minute
    for place in [*places, *LIBRARIES.glob("*.so"), Path(sys.executable).resolve()]:
        assert_as_pyelftools(place)
    assert len(places) >= 10


def test_sections_that_are_stripped_or_too_many_to_count(tmp_path):
    """The loader needs none; tools say so."""
    place = tmp_path / "lib.so"
    place.write_bytes(patched((40, "<Q", 0), (60, "<H", 0), (62, "<H", 0)))
    assert read_dynamic(place) == read_dynamic(LIBRARIES / "gb10.so")
    with pytest.raises(SourceError, match="no section headers"):
        parse(place.read_bytes())
    # More sections than 16 bits count are counted in the first one.
    counted = ((TABLE + 32, "<Q", COUNT), (TABLE + 40, "<I", NAMES))
    assert parse(patched((60, "<H", 0), (62, "<H", 0xFFFF), *counted)) == parse(GB10)


# Damage


def parse(data: bytes) -> Library:
    return parse_library(io.BytesIO(data), "lib.so")


def patched(*changes: tuple[int, str, int]) -> bytes:
    data = bytearray(GB10)
    for place, layout, value in changes:
        struct.pack_into(layout, data, place, value)
    return bytes(data)


def find(places: range, layout: str, value: int) -> int:
    """Where the first place with a number is."""
    return next(
        place for place in places if struct.unpack_from(layout, GB10, place)[0] == value
    )


def header(kind: int) -> int:
    """Where the first section header of a type is."""
    return find(range(TABLE + 4, TABLE + COUNT * 64, 64), "<I", kind) - 4


def program(kind: int) -> int:
    """Where the first program header of a type is."""
    return find(range(PROGRAMS, PROGRAMS + PROGRAM_COUNT * 56, 56), "<I", kind)


ENTRIES, LENGTH = (
    struct.unpack_from("<Q", GB10, program(DYNAMIC) + at)[0] for at in (8, 32)
)
VERSIONS = struct.unpack_from("<Q", GB10, header(0x6FFFFFFE) + 24)[0]


def entry(tag: int) -> int:
    """Where the value of a tag of the dynamic section is."""
    return 8 + find(range(ENTRIES, ENTRIES + LENGTH, 16), "<Q", tag)


def many_strings() -> bytes:
    """4000 libraries whose names are the same 60 KB, in a segment of its own behind the file."""
    table = struct.pack("<QQ", 1, 0) * 4000 + bytes(16)
    start = len(GB10)
    names = b"A" * 60_000 + b"\0"
    strings = start + 32 + len(table)
    sizes = {DYNAMIC: len(table) + 32, LOAD: strings + len(names)}
    changes = [(program(kind) + 32, "<Q", size) for kind, size in sizes.items()]
    changes += [(program(LOAD) + 8, "<Q", 0), (program(LOAD) + 16, "<Q", 0)]
    changes += [(program(DYNAMIC) + 8, "<Q", start)]
    return (
        patched(*changes)
        + struct.pack("<4Q", 5, strings, 10, len(names))
        + table
        + names
    )


def many_versions() -> bytes:
    """Libraries behind one another, four bytes apart and each with versions, to the file's end."""
    start, count = len(GB10), 1 << 16
    changes = (
        (entry(0x6FFFFFFE), "<Q", start),
        (program(LOAD) + 32, "<Q", start + 4 * count),
    )
    return patched(*changes) + struct.pack("<I", 4) * count


def many_sections() -> bytes:
    """As many sections as the first one says, whose names are a megabyte each."""
    start, count, names = len(GB10), 1 << 16, b"A" * (1 << 20) + b"\0"
    first = struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, count, 1, 0, 0, 0)
    place = start + count * 64
    text = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, place, len(names), 0, 0, 0, 0)
    head = patched((40, "<Q", start), (60, "<H", 0), (62, "<H", 0xFFFF))
    return head + first + text * (count - 1) + names


NOWHERE = (1 << 64) - 1
SECTION = header(1)  # SHT_PROGBITS
DAMAGED = (
    (b"", "is not an ELF file"),
    (b"\x7fELF", "header is cut short"),
    (patched((4, "<B", 1)), "64-bit little-endian"),
    (GB10[:64], "ends behind the end"),
    (GB10[:40] + bytes(8) + GB10[48:], "no section headers"),
    (
        patched((60, "<H", 0), (TABLE + 32, "<Q", 1 << 60)),
        "more sections than any real",
    ),
    (patched((62, "<H", COUNT)), "have no names"),
    (patched((TABLE + NAMES * 64 + 32, "<Q", 1 << 40)), "names .* are too long"),
    (patched((SECTION, "<I", 1 << 30)), "name of a section does not end"),
    (
        patched((SECTION + 32, "<Q", len(GB10))),
        r"section '\.\S+' ends behind the end of the file",
    ),
    (patched((SECTION + 24, "<Q", 1 << 63)), "ends behind the end of the file"),
    (many_sections(), "names of its sections are too long"),
    (patched((56, "<H", 65_535)), "more program headers"),
    (patched((program(LOAD) + 8, "<Q", 1 << 63)), "ends behind the end"),
    (patched((program(DYNAMIC) + 32, "<Q", 32)), "does not end"),
    (patched((entry(5), "<Q", 1 << 40)), "nothing is loaded at"),
    (patched((entry(1), "<Q", 1 << 40)), "behind the table of strings"),
    (many_strings(), "longer than those of any real library"),
    (patched((VERSIONS + 8, "<I", NOWHERE >> 32)), "nothing is loaded at"),
    (many_versions(), "more symbol versions than any real library"),
)


def test_what_is_damaged_or_an_object_is_refused(tmp_path):
    for data, says in DAMAGED:
        with pytest.raises(SourceError, match=says) as caught:
            parse(data)
        assert caught.value.what.startswith("lib.so ")
    place = tmp_path / "lib.o"
    place.write_bytes(patched((16, "<H", 1)))  # ET_REL
    with pytest.raises(SourceError, match="neither a program nor a shared library"):
        read_dynamic(place)
    assert parse(place.read_bytes()).needed == ()


PLACES = st.integers(0, 64 + PROGRAM_COUNT * 56) | st.integers(0, len(GB10) - 1)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(PLACES, st.binary(min_size=1, max_size=8)), max_size=6),
    st.none() | st.integers(0, len(GB10)),
)
def test_damage_is_an_error_or_a_result_and_nothing_else(
    tmp_path_factory, changes, end
):
    data = bytearray(GB10)
    for place, new in changes:
        data[place : place + len(new)] = new
    place = tmp_path_factory.getbasetemp() / "damaged.so"
    place.write_bytes(data[:end])
    for ask in (
        read_dynamic,
        lambda path: parse(path.read_bytes()),
    ):
        with contextlib.suppress(SourceError):
            assert isinstance(ask(place), (Dynamic, bool))
