"""A wheel written anew: what does not change keeps its bytes, and the rest is right."""

from __future__ import annotations

import stat
import struct
import zipfile

import pytest

from patchkit.errors import PatchkitError, SourceError
from patchkit.wheel.file.metadata import find_faults
from patchkit.wheel.file.wheelfile import WheelFile
from patchkit.wheel.file.write import rewrite_wheel
from support.vllm_wheels import KERNELS, PATCHED, VERSION, vllm_wheel

OLD, NEW = f"vllm-{VERSION}.dist-info", f"vllm-{VERSION}+x.dist-info"
TAG = "Tag: cp38-abi3-manylinux_2_28_aarch64\n"
OUT = f"vllm-{VERSION}+x-cp38-abi3-manylinux_2_28_aarch64.whl"
CHANGED = {
    PATCHED.path: b"patched = True\n",
    "vllm/new.py": b"new = True\n",
    f"{NEW}/METADATA": f"Metadata-Version: 2.4\nName: vllm\nVersion: {VERSION}+x\n".encode(),
    f"{NEW}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\n{TAG}".encode(),
}


def written(source, dest, changed=CHANGED):
    with WheelFile(source) as wheel:
        rewrite_wheel(wheel, dest, (OLD, NEW), changed)
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
        infos, names = new.infolist(), new.namelist()
        for info in old.infolist():
            path = info.filename.replace(OLD, NEW)
            if path not in CHANGED and not path.endswith("/RECORD"):
                assert new.read(path) == old.read(info)
                assert new.getinfo(path).compress_type == zipfile.ZIP_DEFLATED
        assert {path: new.read(path) for path in CHANGED} == CHANGED
    assert names == sorted(names, key=lambda n: (n.startswith(NEW), n.endswith("/RECORD"), n))
    assert names[-1] == f"{NEW}/RECORD"
    assert {info.date_time for info in infos} == {(1980, 1, 1, 0, 0, 0)}
    programs = {i.filename for i in infos if (i.external_attr >> 16) & stat.S_IXUSR}
    assert programs == set(KERNELS)


def test_the_same_again_whatever_the_dates(source, rewritten, tmp_path):
    first = rewritten(source)
    later = tmp_path / "later" / source.name
    later.parent.mkdir()
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(later, "w") as new:
        for info in reversed(old.infolist()):
            info.date_time = (2001, 1, 1, 0, 0, 0)
            new.writestr(info, old.read(info), info.compress_type)
    again = rewritten(later, name="again.whl")
    assert again.read_bytes() == first.read_bytes()


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (lambda old: old.replace(b"__init__.py", b"__init__.p_"), "has no digest of"),
        (lambda _old: None, "vllm-0.19.1.dist-info/RECORD: is missing"),
    ],
)
def test_wheels_that_are_refused(source, rewritten, record, words):
    with zipfile.ZipFile(source) as bundle:
        members = {info.filename: bundle.read(info) for info in bundle.infolist()}
    changed = record(members.pop(f"{OLD}/RECORD"))
    with zipfile.ZipFile(source, "w") as bundle:
        for path, data in members.items():
            bundle.writestr(path, data)
        if changed is not None:
            bundle.writestr(f"{OLD}/RECORD", changed)
    with pytest.raises(SourceError, match=words):
        rewritten(source)


def test_an_encrypted_member(source, rewritten):
    data = bytearray(source.read_bytes())
    place = data.rindex(b"PK\x01\x02")
    data[place + 8] |= 1
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
