"""A wheel written anew: what does not change keeps its bytes, and the rest is right."""

from __future__ import annotations

import io
import stat
import struct
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_what_does_not_change_keeps_its_bytes(source, rewritten):
    made = rewritten(source)
    for path in KERNELS:
        assert raw(made, path) == raw(source, path)
    with zipfile.ZipFile(made) as new, zipfile.ZipFile(source) as old:
        assert new.testzip() is None
        for info in old.infolist():
            path = info.filename.replace(OLD, NEW)
            if path not in CHANGED and not path.endswith("/RECORD"):
                assert new.read(path) == old.read(info)
                assert new.getinfo(path).compress_type == zipfile.ZIP_DEFLATED
        for path, data in CHANGED.items():
            assert new.read(path) == data
            assert new.getinfo(path).compress_type == zipfile.ZIP_STORED


def test_the_new_wheel_is_whole_and_in_order(source, rewritten):
    made = rewritten(source)
    assert list(find_faults(made)) == []
    with zipfile.ZipFile(made) as bundle:
        infos = bundle.infolist()
    names = [info.filename for info in infos]
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


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,3}(/[a-z]{1,3}){0,2}\.py", fullmatch=True), st.binary(max_size=99)
    ),
    st.dictionaries(
        st.from_regex(r"[a-z]{1,3}(/[a-z]{1,3}){0,2}\.py", fullmatch=True), st.binary(max_size=99)
    ),
)
def test_any_contents(tmp_path_factory, kept, changed):
    folder = tmp_path_factory.mktemp("wheel")
    source = vllm_wheel(folder, change=lambda members: members.update(kept), libraries={})
    dest = folder / OUT
    written(source, dest, {**CHANGED, **changed})
    assert list(find_faults(dest)) == []
    with zipfile.ZipFile(dest) as bundle:
        assert {n: bundle.read(n) for n in kept | changed} == kept | changed


def _unlisted(data):
    return data.replace(b"vllm/__init__.py", b"vllm/__init__.p_")


def _spoiled(place, spoil):
    """The wheel with members or bytes changed behind RECORD's back."""
    with zipfile.ZipFile(place) as bundle:
        members = {info.filename: bundle.read(info) for info in bundle.infolist()}
    spoil(members)
    with zipfile.ZipFile(place, "w") as bundle:
        for path, data in members.items():
            bundle.writestr(path, data)
    return place


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda m: m.update({f"{OLD}/RECORD": _unlisted(m[f"{OLD}/RECORD"])}), "no digest of"),
        (lambda m: m.pop(f"{OLD}/RECORD"), "vllm-0.19.1.dist-info/RECORD: is missing"),
        (lambda m: m.update({"../escaped.py": b""}), "leads out of the wheel"),
        (lambda m: m.update({"/etc/cron.d/x": b""}), "leads out of the wheel"),
        (lambda m: m.update({"vllm/zeros": bytes(1 << 20)}), "no digest of vllm/zeros"),
    ],
)
def test_wheels_that_are_refused(source, rewritten, spoil, words):
    with pytest.raises(SourceError, match=words):
        rewritten(_spoiled(source, spoil))


def test_an_encrypted_member(source, rewritten):
    data = bytearray(source.read_bytes())
    place = data.rindex(b"PK\x01\x02")
    data[place + 8] |= 1
    source.write_bytes(data)
    with pytest.raises(SourceError, match="encrypted"):
        rewritten(source)


def test_damage_anywhere_is_an_error_of_ours_or_found_by_record(source, tmp_path):
    """A wheel cut short or with a byte turned: never a crash, and never a sound wheel."""
    whole = source.read_bytes()
    sound = io.BytesIO()
    dest = tmp_path / OUT
    written(source, dest)
    sound.write(dest.read_bytes())
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
        assert dest.read_bytes() == sound.getvalue() or list(find_faults(dest))
