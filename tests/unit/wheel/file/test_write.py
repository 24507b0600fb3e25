"""Wheels that are written: equal contents are equal bytes, and the rest keeps its own."""

import random
import stat
import struct
import tempfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkit.errors import PatchkitError, SourceError
from patchkit.wheel.file.wheelfile import WheelFile, find_faults
from patchkit.wheel.file.write import rewrite_wheel, seal_wheel
from support.vllm_wheels import KERNELS, PATCHED, VERSION, vllm_wheel
from support.wheels import write_zip

LABEL = "2.29.7+gb10.abc123"
NAME = f"nvidia_nccl_cu13-{LABEL}"
HOME = f"{NAME}.dist-info"
TAG = "py3-none-manylinux_2_35_aarch64"
WHEEL = b"Wheel-Version: 1.0\nGenerator: scikit-build-core 1\nRoot-Is-Purelib: false\n"
CONTENTS = {
    f"{HOME}/METADATA": (
        f"Metadata-Version: 2.4\nName: nvidia-nccl-cu13\nVersion: {LABEL}\n".encode()
    ),
    f"{HOME}/WHEEL": WHEEL + b"Tag: py3-none-linux_aarch64\n\n",
    f"{HOME}/RECORD": b"what the front end wrote\n",
    f"{HOME}/patchkit.json": b"{}\n",
    "nvidia/nccl/lib/libnccl.so.2": b"\x7fELF" + bytes(range(256)) * 40,
    "nvidia/nccl/include/nccl.h": b"#define NCCL_MAJOR 2\n",
    "nvidia/nccl/bin/tool": b"#!/bin/sh\n",
    "zz/after.txt": b"",
}
PROGRAMS = {"nvidia/nccl/bin/tool"}


def write_raw(folder, contents=CONTENTS, *, seed=None, folders=True):
    """A wheel as some front end might write it; with a seed, in another way each time."""
    rng, raw = random.Random(seed), Path(folder) / f"{NAME}-py3-none-linux_aarch64.whl"
    names = list(contents)
    rng.shuffle(names)
    with zipfile.ZipFile(raw, "w") as bundle:
        if folders:
            bundle.mkdir("nvidia")
        for name in names:
            info = zipfile.ZipInfo(
                name, (rng.randint(1980, 2100), rng.randint(1, 12), 1, 0, 0, 2)
            )
            mode = rng.choice(
                [0o755, 0o700] if name in PROGRAMS else [0o644, 0o600, 0o666]
            )
            info.external_attr = (stat.S_IFREG | mode) << 16 | rng.choice([0, 0x20])
            info.create_system = 3
            info.comment = rng.choice([b"", b"by somebody"])
            info.compress_type = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
            bundle.writestr(info, contents[name], compresslevel=rng.randint(0, 9))
    return raw


def sealed(folder, **how):
    place = Path(folder) / "sealed"
    place.mkdir(exist_ok=True)
    return seal_wheel(write_raw(folder, **how), place, "manylinux_2_35_aarch64", {}, {})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return sealed(tmp_path_factory.mktemp("one"), seed=0)


@given(seed=st.integers(), folders=st.booleans())
def test_equal_contents_are_equal_bytes(wheel, seed, folders):
    with tempfile.TemporaryDirectory() as folder:
        other = sealed(folder, seed=seed, folders=folders)
        assert (other.name, other.read_bytes()) == (wheel.name, wheel.read_bytes())


def test_what_is_written(wheel):
    assert wheel.name == f"{NAME}-{TAG}.whl"
    assert list(find_faults(wheel)) == []
    with zipfile.ZipFile(wheel) as bundle:
        infos, names = bundle.infolist(), bundle.namelist()
        said = bundle.read(f"{HOME}/WHEEL").decode().splitlines()
    home = [name for name in names if name.startswith(HOME)]
    assert (
        names
        == sorted(set(names) - set(home)) + sorted(set(home) - {home[-1]}) + home[-1:]
    )
    assert home[-1] == f"{HOME}/RECORD"
    assert "nvidia/" not in names
    assert {info.date_time for info in infos} == {(1980, 1, 1, 0, 0, 0)}
    assert {info.compress_type for info in infos} == {zipfile.ZIP_STORED}
    modes = {info.filename: info.external_attr >> 16 for info in infos}
    assert {
        name for name, mode in modes.items() if mode == stat.S_IFREG | 0o755
    } == PROGRAMS
    assert set(modes.values()) == {stat.S_IFREG | 0o755, stat.S_IFREG | 0o644}
    assert [line for line in said if line.startswith("Tag:")] == [f"Tag: {TAG}"]
    assert [line.split()[1] for line in said if line.startswith("Generator:")] == [
        "patchkit"
    ]
    assert "Root-Is-Purelib: false" in said


def test_licences_that_are_added_are_named(tmp_path):
    """Where PEP 639 has them; what METADATA says besides stays as it is."""
    described = CONTENTS[f"{HOME}/METADATA"] + b"\nText.\n\nMore.\n"
    added = {"licenses/b/LICENSE": "B", "licenses/a/NOTICE": "A", "x.json": "{}"}
    raw = write_raw(tmp_path, {**CONTENTS, f"{HOME}/METADATA": described})
    wheel = seal_wheel(raw, tmp_path, "manylinux_2_35_aarch64", added, {})
    with zipfile.ZipFile(wheel) as bundle:
        metadata = bundle.read(f"{HOME}/METADATA").decode()
        assert bundle.read(f"{HOME}/licenses/b/LICENSE") == b"B"
    message = HeaderParser().parsestr(metadata)
    assert message.get_all("License-File") == ["a/NOTICE", "b/LICENSE"]
    assert (message["Version"], message.get_payload()) == (LABEL, "Text.\n\nMore.\n")
    assert not list(find_faults(wheel))


OLD, NEW = f"vllm-{VERSION}.dist-info", f"vllm-{VERSION}+x.dist-info"
TAG_LINE = "Tag: cp38-abi3-manylinux_2_28_aarch64\n"
OUT = f"vllm-{VERSION}+x-cp38-abi3-manylinux_2_28_aarch64.whl"
CHANGED = {
    PATCHED.path: b"patched = True\n",
    "vllm/new.py": b"new = True\n",
    f"{NEW}/METADATA": f"Metadata-Version: 2.4\nName: vllm\nVersion: {VERSION}+x\n".encode(),
    f"{NEW}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\n{TAG_LINE}".encode(),
}


def written(source, dest):
    with WheelFile(source) as wheel:
        rewrite_wheel(wheel, dest, CHANGED)
    return dest


@pytest.fixture
def source(tmp_path):
    return vllm_wheel(tmp_path / "in")


@pytest.fixture
def rewritten(tmp_path):
    return lambda source, name=OUT: written(source, tmp_path / name)


def raw(wheel, path):
    """A member's bytes as they are stored, found without the code that is tested."""
    with zipfile.ZipFile(wheel) as bundle:
        info = bundle.getinfo(path)
    data = wheel.read_bytes()
    name, extra = struct.unpack_from("<HH", data, info.header_offset + 26)
    start = info.header_offset + 30 + name + extra
    return data[start : start + info.compress_size]


def test_what_does_not_change_keeps_its_bytes_and_all_is_in_order(source, rewritten):
    made = rewritten(source)
    assert list(find_faults(made)) == []
    for path in KERNELS:
        assert raw(made, path) == raw(source, path)
    with zipfile.ZipFile(made) as new, zipfile.ZipFile(source) as old:
        names = new.namelist()
        for info in old.infolist():
            path = info.filename.replace(OLD, NEW)
            if path not in CHANGED and not path.endswith("/RECORD"):
                assert new.read(path) == old.read(info)
                assert new.getinfo(path).compress_type == zipfile.ZIP_DEFLATED
        assert {path: new.read(path) for path in CHANGED} == CHANGED
    assert names == sorted(
        names, key=lambda n: (n.startswith(NEW), n.endswith("/RECORD"), n)
    )


def test_the_same_again_whatever_the_dates(source, rewritten, tmp_path):
    first = rewritten(source)
    later = tmp_path / "later" / source.name
    later.parent.mkdir()
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(later, "w") as new:
        for info in reversed(old.infolist()):
            info.date_time = (2001, 1, 1, 0, 0, 0)
            new.writestr(info, old.read(info), info.compress_type)
    again = rewritten(later, name=f"vllm-{VERSION}+x-again.whl")
    assert again.read_bytes() == first.read_bytes()


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (lambda old: old.replace(b"__init__.py", b"__init__.p_"), "has no digest of"),
        (lambda _old: None, "vllm-0.19.1.dist-info/RECORD: is missing"),
    ],
)
def test_wheels_that_are_refused(source, rewritten, record, words):
    whole = source.read_bytes()
    with zipfile.ZipFile(source) as bundle:
        members = {info.filename: bundle.read(info) for info in bundle.infolist()}
    changed = record(members.pop(f"{OLD}/RECORD"))
    write_zip(source, members | ({} if changed is None else {f"{OLD}/RECORD": changed}))
    with pytest.raises(SourceError, match=words):
        rewritten(source)
    data = bytearray(whole)
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    source.write_bytes(data)
    with pytest.raises(SourceError, match="encrypted"):
        rewritten(source)


def test_damage_anywhere_is_an_error_of_ours_or_found_by_record(source, tmp_path):
    """A wheel cut short or with a byte turned: never a crash, and never a sound wheel."""
    whole, dest = source.read_bytes(), tmp_path / OUT
    sound = written(source, dest).read_bytes()
    for number, position in enumerate(range(7, len(whole), len(whole) // 60)):
        data = bytearray(whole)
        if number % 2:
            del data[position:]
        else:
            data[position] ^= 0x55
        source.write_bytes(data)
        dest.unlink(missing_ok=True)
        try:
            written(source, dest)
        except PatchkitError:
            continue
        assert dest.read_bytes() == sound or list(find_faults(dest))
