"""What the dynamic loader reads of ELF files, beside pyelftools on the same files."""

from __future__ import annotations

import contextlib
import struct
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkit import elf
from patchkit.errors import SourceError
from patchkit.runtime.python.dynamic_section import Dynamic, exports, read_dynamic
from support.layout import link

LIBRARIES = Path(__file__).parents[3] / "data" / "libraries"
GB10 = (LIBRARIES / "gb10.so").read_bytes()
PROGRAMS, COUNT = struct.unpack_from("<Q", GB10, 32)[0], struct.unpack_from("<H", GB10, 56)[0]
LOAD, DYNAMIC = 1, 2
SOURCE = "int defined(void) { return 1; } int needed(void); int call(void) { return needed(); }"


def facts(found):
    return (found.machine, found.soname, found.needed, found.rpath, found.runpath)


def test_the_facts_of_a_library():
    library = read_dynamic(LIBRARIES / "gb10.so")
    assert library == Dynamic(
        machine="aarch64",
        soname="libgb10.so.2",
        needed=("libm.so.6", "libc.so.6"),
        rpath=("$ORIGIN/../lib", "/opt/nccl"),
    )


@pytest.mark.parametrize("style", ["gnu", "sysv", "both"])
@pytest.mark.parametrize("tags", ["--disable-new-dtags", "--enable-new-dtags"])
def test_a_library_as_pyelftools_reads_it(style, tags, tmp_path):
    base = link(tmp_path / "libbase.so", "int needed(void) { return 2; }", soname="libbase.so.1")
    needs = [base, f"-Wl,--hash-style={style}"]
    place = link(
        tmp_path / "lib.so", SOURCE, soname="lib.so.3", needs=needs, path="/a:/b", tags=tags
    )
    found = read_dynamic(place)
    assert facts(found) == facts(elf.read_library(place))
    assert {found.rpath, found.runpath} == {("/a", "/b"), ()}
    symbols = {name: exports(place, name) for name in ("defined", "call", "needed", "nothing")}
    assert symbols == {name: elf.exports(place, name) for name in symbols}
    assert symbols == {"defined": True, "call": True, "needed": False, "nothing": False}


def test_every_library_of_this_python_as_pyelftools_reads_it():
    folders = {sysconfig.get_path("platlib"), sysconfig.get_path("platstdlib")}
    places = [path for folder in folders for path in Path(folder).rglob("*.so*") if path.is_file()]
    for place in places:
        assert facts(read_dynamic(place)) == facts(elf.read_library(place)), place
        for symbol in ("malloc", f"PyInit_{place.name.partition('.')[0]}"):
            assert exports(place, symbol) == elf.exports(place, symbol), (place, symbol)
    assert len(places) >= 10
    python = Path(sys.executable).resolve()
    assert facts(read_dynamic(python)) == facts(elf.read_library(python))


def test_neither_sections_nor_more_than_headers_are_needed(tmp_path):
    """As for the loader: what a strip has removed does not matter."""
    place = tmp_path / "lib.so"
    data = bytearray(GB10)
    struct.pack_into("<Q", data, 40, 0)  # e_shoff
    struct.pack_into("<HH", data, 60, 0, 0)  # e_shnum, e_shstrndx
    place.write_bytes(data)
    assert read_dynamic(place) == read_dynamic(LIBRARIES / "gb10.so")


# Damage


def program(kind):
    """Where the first program header of a type is."""
    places = range(PROGRAMS, PROGRAMS + COUNT * 56, 56)
    return next(place for place in places if struct.unpack_from("<I", GB10, place)[0] == kind)


TABLE, LENGTH = (struct.unpack_from("<Q", GB10, program(DYNAMIC) + at)[0] for at in (8, 32))


def entry(tag):
    """Where the value of a tag of the dynamic section is."""
    places = range(TABLE, TABLE + LENGTH, 16)
    return 8 + next(place for place in places if struct.unpack_from("<Q", GB10, place)[0] == tag)


def changed(*changes):
    data = bytearray(GB10)
    for place, layout, value in changes:
        struct.pack_into(layout, data, place, value)
    return bytes(data)


def many_strings():
    """4000 libraries whose names are the same 60 KB, in a segment of its own behind the file."""
    table = struct.pack("<QQ", 1, 0) * 4000 + bytes(16)
    start = len(GB10)
    names = b"A" * 60_000 + b"\0"
    return (
        changed(
            (program(DYNAMIC) + 8, "<Q", start),
            (program(DYNAMIC) + 32, "<Q", len(table) + 32),
            (program(LOAD) + 8, "<Q", 0),
            (program(LOAD) + 16, "<Q", 0),
            (program(LOAD) + 32, "<Q", start + 32 + len(table) + len(names)),
        )
        + struct.pack("<4Q", 5, start + 32 + len(table), 10, len(names))
        + table
        + names
    )


DAMAGED = {
    "empty": (b"", "is not an ELF file"),
    "archive": (b"!<arch>\n", "is not an ELF file"),
    "magic": (b"\x7fELF", "header is cut short"),
    "32 bit": (changed((4, "<B", 1)), "64-bit little-endian"),
    "object": (changed((16, "<H", 1)), "neither a program nor a shared library"),
    "half": (GB10[: len(GB10) // 2], "ends behind its end"),
    "headers": (changed((56, "<H", 65_535)), "more program headers"),
    "header size": (changed((54, "<H", 0)), "another size"),
    "far headers": (changed((32, "<Q", (1 << 64) - 1)), "ends behind its end"),
    "far segment": (changed((program(LOAD) + 8, "<Q", 1 << 63)), "ends behind its end"),
    "no end": (changed((program(DYNAMIC) + 32, "<Q", 32)), "does not end"),
    "no strings": (changed((entry(5), "<Q", 1 << 40)), "nothing is loaded at"),
    "far string": (changed((entry(1), "<Q", 1 << 40)), "behind the table of strings"),
    "many strings": (many_strings(), "longer than those of any real library"),
}


@pytest.mark.parametrize(("data", "says"), DAMAGED.values(), ids=DAMAGED)
def test_what_is_damaged_is_refused_soon(data, says, tmp_path):
    place = tmp_path / "lib.so"
    place.write_bytes(data)
    start = time.process_time()
    with pytest.raises(SourceError, match=says) as caught:
        read_dynamic(place)
    assert caught.value.what.startswith(str(place))
    assert time.process_time() - start < 2


def test_chains_of_symbols_that_never_end_are_refused_soon(tmp_path):
    """A table of a single bucket, and symbols of whose chain none is the last."""
    start = len(GB10)
    chain = struct.pack("<4I", 1, 1, 0, 0) + struct.pack("<I", 1) + bytes(1 << 20)
    data = changed(
        (entry(0x6FFFFEF5), "<Q", start),
        (program(LOAD) + 32, "<Q", start + len(chain)),
    )
    place = tmp_path / "lib.so"
    place.write_bytes(data + chain)
    before = time.process_time()
    with pytest.raises(SourceError, match="a chain of its symbols does not end"):
        exports(place, "ncclGetVersion")
    assert time.process_time() - before < 2


@settings(max_examples=400, deadline=2000)
@given(
    st.lists(
        st.tuples(
            st.one_of(
                st.integers(0, 64 + COUNT * 56),
                st.integers(TABLE, TABLE + LENGTH),
                st.integers(0, len(GB10) - 1),
            ),
            st.binary(min_size=1, max_size=8),
        ),
        max_size=6,
    ),
    st.one_of(st.none(), st.integers(0, len(GB10))),
)
def test_damage_is_an_error_or_a_result_and_nothing_else(tmp_path_factory, changes, end):
    data = bytearray(GB10)
    for place, new in changes:
        data[place : place + len(new)] = new
    place = tmp_path_factory.getbasetemp() / "damaged.so"
    place.write_bytes(data[:end])
    for ask in (read_dynamic, lambda path: exports(path, "ncclGetVersion")):
        with contextlib.suppress(SourceError):
            assert isinstance(ask(place), (Dynamic, bool))
