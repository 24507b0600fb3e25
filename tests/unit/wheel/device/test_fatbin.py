"""Fat binaries: what their headers say, and that no bytes make the walker fail or run on."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import pytest

from patchkit.elf import Section, parse_library
from patchkit.errors import SourceError
from patchkit.target import Arch
from patchkit.wheel.device.fatbin import CodeEntry, read_entries

MAGIC = 0xBA55ED50
PTX, SASS, LTO = 1, 2, 8
LIBRARIES = Path(__file__).parents[3] / "data" / "libraries"


def entry(kind=SASS, arch=121, flags=0x11, *, header=64, payload=8, size=None):
    """An entry as nvcc writes it; ``size`` is what the header claims of the payload."""
    claimed = payload if size is None else size
    head = struct.pack("<HHIQ12xI8xQ", kind, 0x101, header, claimed, arch, flags)
    return head + bytes(max(header, 64) - len(head)) + b"\xff" * payload


def container(*parts, magic=MAGIC, version=1, header=16, size=None):
    body = b"".join(parts)
    claimed = len(body) if size is None else size
    return struct.pack("<IHHQ", magic, version, header, claimed) + bytes(max(header - 16, 0)) + body


def walk(data: bytes, *, before=24):
    """The entries of a section that lies ``before`` bytes into a file, with more behind it."""
    stream = io.BytesIO(b"\x11" * before + data + container(entry()))
    return read_entries(stream, [Section(".nv_fatbin", before, len(data))], "lib.so")


def test_entries_are_read_in_order():
    first = container(
        entry(SASS, 121, 0x1100011, header=112, payload=40), entry(PTX, 120, 0x2011, header=80)
    )
    second = container(entry(LTO, 90, 0x8011, payload=0), header=24)
    assert walk(first + bytes(200) + second + bytes(8)) == (
        CodeEntry("sass", Arch(12, 1, "a", False), "none", 152, 24),
        CodeEntry("ptx", Arch(12, 0, "", True), "lz4", 88, 24),
        CodeEntry("lto", Arch(9, 0, "", False), "zstd", 64, 24 + len(first) + 200),
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x50", "a header is cut off"),
        (container(entry(), magic=0xBA55ED51), "no fat binary"),
        (container(entry(), header=15), "no fat binary"),
        (container(size=(1 << 64) - 16), "ends behind its section"),
        (container(entry(), bytes(20)), "a header is cut off"),
        (container(entry(header=63)), "does not fit"),
        (container(entry(size=(1 << 64) - 1)), "does not fit"),
        (container(entry(header=(1 << 32) - 1, payload=0)[:64]), "does not fit"),
        (container(entry(arch=(1 << 32) - 1)), "for the arch 4294967295"),
        (container(entry(flags=0x300011)), "for the arch 121af"),
        (container(entry()) + bytes(4097) + container(entry()), "no fat binary"),
        (container(entry()) + b"\0\0\0\1" + container(entry()), "no fat binary"),
    ],
)
def test_what_is_no_row_of_fat_binaries_is_refused(data, says):
    with pytest.raises(SourceError, match=says) as caught:
        walk(data)
    assert caught.value.what.startswith("lib.so cannot be read: .nv_fatbin at byte ")


def test_sections_that_lie_over_each_other_do_not_multiply_the_work():
    data = container(entry(payload=0) * 1000)
    sections = [Section(".nv_fatbin", 0, len(data))] * 60_000
    with pytest.raises(SourceError, match="more than 250,000 pieces"):
        read_entries(io.BytesIO(data), sections, "lib.so")


@pytest.mark.parametrize("name", ["archs", "gb10", "stock", "modes"])
def test_every_byte_of_a_real_section_is_accounted_for(name):
    stream = io.BytesIO((LIBRARIES / f"{name}.so").read_bytes())
    sections = parse_library(stream, name).sections
    for section in (s for s in sections if s.name in (".nv_fatbin", "__nv_relfatbin")):
        found = read_entries(stream, [section], name)
        known = sum(each.size for each in found) + 16 * len({each.container for each in found})
        padding = section.size - known
        assert 0 <= padding < 256 * len(found), section
