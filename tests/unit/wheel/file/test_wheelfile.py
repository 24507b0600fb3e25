"""A wheel is opened once: what was checked is what is read, whatever becomes of its path."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkit.errors import PatchkitError, SourceError
from patchkit.wheel.file.metadata import read_metadata
from patchkit.wheel.file.wheelfile import WheelFile
from support.vllm_wheels import KERNELS, PATCHED, VERSION, vllm_wheel

HOME = f"vllm-{VERSION}.dist-info"


def test_another_file_by_its_name_changes_nothing(tmp_path):
    path = vllm_wheel(tmp_path)
    other = vllm_wheel(tmp_path / "other", libraries={}, change=lambda m: m.pop(PATCHED.path))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
        raw = {info.filename: info.compress_size for info in archive.infolist()}
    with WheelFile(path) as wheel:
        other.replace(path)
        assert wheel.sha256 == sha256
        assert dict(wheel.read_libraries(contents_of)) == KERNELS
        assert dict(wheel.texts()) == {n: d for n, d in contents.items() if n not in KERNELS}
        for name, data in contents.items():
            assert b"".join(wheel.unpacked(name)) == data
            assert sum(map(len, wheel.stored(name))) == raw[name]
        assert wheel.record(f"{HOME}/RECORD").keys() == contents.keys()
        assert read_metadata(wheel).pins == {"torch": "2.10.0"}


def contents_of(path, stream):
    stream.seek(0)
    return path, stream.read()


def test_only_the_libraries_that_are_named_are_unpacked(tmp_path):
    first, *_rest = KERNELS
    with WheelFile(vllm_wheel(tmp_path)) as wheel:
        found = wheel.read_libraries(contents_of, only=[first, "vllm/absent.so", PATCHED.path])
        assert found == [(first, KERNELS[first])]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update({"../x.py": b""}), "'../x.py' leads out of the wheel"),
        (lambda m: m.update({"/etc/x": b""}), "'/etc/x' leads out of the wheel"),
        # A text that grows, which only readers of texts refused once.
        (lambda m: m.update({"x.json": bytes(90 << 20)}), "makes it more than 100 times as large"),
    ],
)
def test_a_hostile_wheel_is_not_opened(tmp_path, change, words):
    with pytest.raises(SourceError, match="no wheel is built like that") as caught:
        WheelFile(vllm_wheel(tmp_path, libraries={}, change=change))
    assert words in caught.value.what


def test_a_member_that_is_missing_or_too_large_is_named(tmp_path):
    big = {"vllm/big.json": bytes((1 << 26) + 1)}
    with WheelFile(vllm_wheel(tmp_path, change=lambda m: m.update(big))) as wheel:
        with pytest.raises(SourceError, match=r"absent\.py: is missing"):
            wheel.read("absent.py")
        with pytest.raises(SourceError, match=r"'vllm/big\.json' has 67,108,865 bytes"):
            wheel.read("vllm/big.json")


PATHS = st.from_regex(r"[a-zé]{1,3}(/[a-z.]{1,3}[a-z]){0,2}", fullmatch=True)


@given(st.dictionaries(PATHS, st.binary(max_size=99), max_size=6), st.data())
def test_any_wheel_is_read_as_zipfile_reads_it_or_refused(files, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        with WheelFile(path) as wheel:
            assert {name: wheel.read(name) for name in wheel.members} == files
        damaged = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(damaged)
        with contextlib.suppress(PatchkitError), WheelFile(path) as wheel:
            for name in wheel.members:
                b"".join(wheel.unpacked(name))
                b"".join(wheel.stored(name))
            read_metadata(wheel)
            list(wheel.texts())
