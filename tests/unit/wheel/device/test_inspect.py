"""What a library or a wheel holds, by its fat binaries, and how that reaches a device."""

import contextlib
import io
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkit.elf import Section, parse_library
from patchkit.errors import PatchkitError, ProofError, SourceError
from patchkit.fatbin import CodeEntry, DeviceCode, read_entries
from patchkit.target import Arch, Load, parse_arch, targets
from patchkit.wheel.device.inspect import LIVE, inspect_file, prove_exact
from support.wheels import inspected_wheel, write_zip

LIBRARIES = Path(__file__).parents[3] / "data" / "libraries"
GB10, H200 = targets()["gb10"], targets()["h200"]
WHEEL = "nvidia_nccl_cu13-2.29.7+gb10.1a2b3c-py3-none-manylinux_2_35_aarch64.whl"


def only(name: str):
    return inspect_file(LIBRARIES / f"{name}.so")


def test_archs_and_kinds():
    codes = only("archs").codes
    names = {"sass": ["sm_100f", "sm_120", "sm_120f", "sm_121", "sm_121a"]}
    names["ptx"] = ["compute_120", "compute_120f"]
    for kind, expected in names.items():
        assert sorted(code.name for code in codes if code.kind == kind) == expected
    assert {(code.section, code.compression, code.count) for code in codes} == {
        (LIVE, "zstd", 1)
    }


def test_how_an_entry_reaches_a_gb10():
    for kind, expected in (
        ("sass", Load.EXACT),
        ("lto", Load.NONE),
        ("kind 16", Load.NONE),
    ):
        assert DeviceCode(kind, parse_arch("12.1")).reach(GB10) is expected


@pytest.mark.parametrize(
    ("name", "target", "expected", "each"),
    [
        ("gb10", GB10, Load.EXACT, {Load.EXACT: 2, Load.NONE: 1}),
        ("stock", GB10, Load.COMPATIBLE, {Load.COMPATIBLE: 2, Load.NONE: 1}),
        ("modes", GB10, Load.EXACT, {Load.EXACT: 2, Load.JIT: 1, Load.NONE: 1}),
        ("modes", H200, Load.JIT, {Load.JIT: 1, Load.NONE: 3}),
    ],
)
def test_how_a_library_reaches_a_device(name, target, expected, each):
    binary = only(name)
    assert (binary.load(target), binary.loads(target)) == (expected, each)


def entry_places(data: bytes, section: str) -> list[int]:
    """Where the entries of a section are, found without the code that is tested."""
    found = parse_library(io.BytesIO(data), "gb10.so").sections
    (place,) = (each for each in found if each.name == section)
    position, end, places = place.offset, place.offset + place.size, []
    while position < end:
        if data[position : position + 4] != b"\x50\xed\x55\xba":
            position += 8
            continue
        stop = position + 16 + struct.unpack_from("<Q", data, position + 8)[0]
        position += 16
        while position < stop:
            places.append(position)
            position += sum(struct.unpack_from("<IQ", data, position + 4))
    return places


def changed(tmp_path: Path, name: str, changes: dict[int, dict], section: str = LIVE):
    """A library of which some entries claim to be something else."""
    data = bytearray((LIBRARIES / f"{name}.so").read_bytes())
    fields = {"kind": (0, "<H"), "arch": (28, "<I"), "flags": (40, "<Q")}
    places = entry_places(bytes(data), section)
    for number, change in changes.items():
        for field, value in change.items():
            offset, layout = fields[field]
            struct.pack_into(layout, data, places[number] + offset, value)
    path = tmp_path / f"{name}.so"
    path.write_bytes(data)
    return inspect_file(path)


def test_code_that_was_linked_is_linked_anew_only_from_all_of_its_parts(tmp_path):
    # Live: sm_90, sm_120 and PTX, twice, and sm_100f; the one part has the same three.
    old = {number: {"arch": 90, "kind": 2} for number in range(7)}
    lost = changed(tmp_path, "stock", old)
    assert lost.loads(GB10) == {Load.NONE: 3}
    assert lost.linked_anew(GB10)
    assert lost.load(GB10) is Load.JIT
    assert not lost.linked_anew(H200)  # there is live code for it
    part = replace(lost.relocatable[0], container=0)
    assert part.arch == Arch(9, 0, "", False)
    assert not replace(lost, relocatable=(*lost.relocatable, part)).linked_anew(GB10)
    assert not replace(lost, relocatable=()).linked_anew(GB10)
    assert not changed(
        tmp_path, "gb10", {n: {"arch": 90} for n in range(3)}
    ).linked_anew(H200)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {0: {"arch": 120}},
            ["1 live entries are sm_121, 1 are not: 1 sm_120 (the first at byte"],
        ),
        ({1: {"arch": 120, "flags": 0x1208011}}, ["1 sm_120f"]),
        ({0: {"arch": 120}, 1: {"arch": 90}}, ["0 live entries", "1 sm_120, 1 sm_90"]),
        ({0: {"kind": 1}}, ["1 live entries", "1 compute_121 "]),
        ({0: {"kind": 64}}, ["1 kind 64_121"]),
        (
            {n: {"arch": 100, "flags": 0x1208011} for n in (0, 1)},
            ["0 live entries", "always add"],
        ),
    ],
)
def test_a_build_that_is_not_exact_names_what_offends(tmp_path, change, says):
    with pytest.raises(ProofError) as caught:
        prove_exact(changed(tmp_path, "gb10", change), GB10, cpu="aarch64")
    text = str(caught.value)
    assert text.startswith("gb10.so is not exact for NVIDIA DGX Spark (GB10)")
    assert not [words for words in says if words not in text], text
    assert "NVCC_GENCODE=-gencode=arch=compute_121,code=sm_121" in text


def wheel(folder: Path, *members: tuple[str, bytes], name: str = WHEEL) -> Path:
    return write_zip(folder / name, dict(members), zipfile.ZIP_DEFLATED)


def data(name: str) -> bytes:
    return (LIBRARIES / f"{name}.so").read_bytes()


def test_every_library_of_a_wheel_is_inspected(tmp_path):
    path = wheel(
        tmp_path,
        ("nvidia/nccl/lib/libnccl.so.2", data("gb10")),
        ("nvidia/nccl/lib/not-named-so", data("stock")),
        ("nvidia/nccl/lib/libnccl.so", b"INPUT(libnccl.so.2)\n"),
        ("nvidia/nccl/include/nccl.h", b"\x7fELF is no library\n"),
        (
            "nvidia/nccl/lib/device.cubin",
            data("gb10")[:18] + b"\xbe\0" + data("gb10")[20:],
        ),
        ("nvidia/nccl/lib/", b""),
    )
    first, second = inspected_wheel(path)
    assert second.name == "nvidia/nccl/lib/not-named-so"
    assert (first.name, first.codes) == (
        "nvidia/nccl/lib/libnccl.so.2",
        only("gb10").codes,
    )
    prove_exact(first, GB10, cpu="aarch64")


def test_the_cpu_in_the_name_of_a_wheel(tmp_path):
    for platform in (
        "manylinux_2_17_aarch64.manylinux_2_17_x86_64",
        "any",
        "linux_x86_64",
    ):
        name = f"nvidia_nccl_cu13-2.29.7-py3-none-{platform}.whl"
        path = wheel(
            tmp_path, ("nvidia/nccl/lib/libnccl.so.2", data("gb10")), name=name
        )
        if platform != "linux_x86_64":
            assert inspected_wheel(path)[0].library.machine == "aarch64"
    refused(path, "libnccl.so.2 is for aarch64", "name says x86_64")


def renamed(path: Path, old: str, new: str) -> Path:
    """Names of one length, exchanged in the archive itself: zipfile would refuse to write some."""
    path.write_bytes(path.read_bytes().replace(old.encode(), new.encode()))
    return path


def refused(path: Path, *words: str) -> None:
    with pytest.raises(SourceError) as caught:
        inspected_wheel(path)
    assert not [word for word in words if word not in str(caught.value)], str(
        caught.value
    )


def test_wheels_that_are_built_to_harm_are_refused(tmp_path):
    library = ("a/lib.so", data("gb10"))
    refused(
        renamed(wheel(tmp_path, library), "a/lib.so", "../ib.so"),
        "'../ib.so' leads out",
    )
    refused(
        renamed(wheel(tmp_path, library), "a/lib.so", "/alib.so"),
        "'/alib.so' leads out",
    )
    refused(renamed(wheel(tmp_path, library), "a/lib.so", "a\\lib.so"[:8]), "leads out")
    twice = wheel(tmp_path, library, ("b/lib.so", data("stock")))
    refused(renamed(twice, "b/lib.so", "a/lib.so"), "'a/lib.so' is there twice")


def test_many_names_for_the_same_bytes_do_not_multiply_them(tmp_path):
    """A zip whose members all lie over each other, as the known bombs do."""
    content = data("gb10") + bytes(30 << 20)
    path = wheel(tmp_path, ("lib0.so", content))
    bundle = path.read_bytes()
    start = bundle.rindex(b"PK\1\2")
    end = bundle.rindex(b"PK\5\6")
    record = bundle[start:end]
    records = b"".join(record.replace(b"lib0.so", b"lib%d.so" % n) for n in range(9))
    tail = bytearray(bundle[end:])
    struct.pack_into("<HHI", tail, 8, 9, 9, len(records))
    path.write_bytes(bundle[:start] + records + tail)
    refused(path, "'lib1.so' has the same bytes as another one")


def test_a_compression_that_no_wheel_has_is_refused(tmp_path):
    path = tmp_path / WHEEL
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as bundle:
        bundle.writestr("lib.so", data("gb10"))
    refused(path, "'lib.so' is compressed as no wheel is")


LIBRARY = data("gb10")
INSIDE = st.integers(0, len(LIBRARY) - 1)
VALUES = st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
# Headers are where damage tells; the rest is code.
HEADERS = [
    *range(64),
    *range(int.from_bytes(LIBRARY[40:48], "little"), len(LIBRARY)),
    *(place + byte for place in entry_places(LIBRARY, LIVE) for byte in range(-16, 64)),
]
CHANGES = st.lists(
    st.tuples(st.one_of(INSIDE, st.sampled_from(HEADERS)), VALUES), max_size=12
)


@settings(max_examples=400, deadline=5000)
@given(CHANGES, st.one_of(st.just(len(LIBRARY)), INSIDE))
def test_any_damage_is_read_or_refused(tmp_path_factory, changes, length):
    content = bytearray(LIBRARY)
    for place, value in changes:
        content[place] = value
    path = tmp_path_factory.getbasetemp() / "fuzzed.so"
    path.write_bytes(content[:length])
    with contextlib.suppress(PatchkitError):
        prove_exact(inspect_file(path), GB10, cpu="aarch64")


MAGIC = 0xBA55ED50
PTX, SASS, LTO = 1, 2, 8


def entry(kind=SASS, arch=121, flags=0x11, *, header=64, payload=8, size=None):
    """An entry as nvcc writes it; ``size`` is what the header claims of the payload."""
    claimed = payload if size is None else size
    head = struct.pack("<HHIQ12xI8xQ", kind, 0x101, header, claimed, arch, flags)
    return head + bytes(max(header, 64) - len(head)) + b"\xff" * payload


def container(*parts, magic=MAGIC, version=1, header=16, size=None):
    body = b"".join(parts)
    claimed = len(body) if size is None else size
    return (
        struct.pack("<IHHQ", magic, version, header, claimed)
        + bytes(max(header - 16, 0))
        + body
    )


def walk(data: bytes, *, before=24):
    """The entries of a section that lies ``before`` bytes into a file, with more behind it."""
    stream = io.BytesIO(b"\x11" * before + data + container(entry()))
    return read_entries(stream, [Section(".nv_fatbin", before, len(data))], "lib.so")


def test_entries_are_read_in_order():
    first = container(
        entry(SASS, 121, 0x1100011, header=112, payload=40),
        entry(PTX, 120, 0x2011, header=80),
    )
    second = container(entry(LTO, 90, 0x8011, payload=0), header=24)
    behind = 24 + len(first) + 5000
    assert walk(first + bytes(5000) + second + bytes(8)) == (
        CodeEntry("sass", Arch(12, 1, "a", False), "none", 152, 24, 40, 40, (0, 0)),
        CodeEntry("ptx", Arch(12, 0, "", True), "lz4", 88, 24, 192, 0, (0, 0)),
        CodeEntry(
            "lto", Arch(9, 0, "", False), "zstd", 64, behind, behind + 24, 0, (0, 0)
        ),
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
