"""A wheel is opened once, hostile or not; what it says of itself, and what speaks against it."""

import contextlib
import hashlib
import os
import tempfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from patchkit.errors import PatchkitError, SourceError
from patchkit.wheel.device.libraries import check_wheel
from patchkit.wheel.file.torch import torch_of
from patchkit.wheel.file.wheelfile import WheelFile, read_metadata
from support.vllm_wheels import KERNELS, PATCHED, VERSION, vllm_wheel
from support.wheels import write_wheel, write_zip

HOME = f"vllm-{VERSION}.dist-info"


def test_another_file_by_its_name_changes_nothing(tmp_path):
    path = vllm_wheel(tmp_path)
    other = vllm_wheel(
        tmp_path / "other", libraries={}, change=lambda m: m.pop(PATCHED.path)
    )
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
        raw = {info.filename: info.compress_size for info in archive.infolist()}
    with WheelFile(path) as wheel:
        other.replace(path)
        assert wheel.sha256 == sha256
        assert dict(wheel.read_libraries(contents_of)) == KERNELS
        first, *_rest = KERNELS
        found = wheel.read_libraries(
            contents_of, only=[first, "vllm/absent.so", PATCHED.path]
        )
        assert found == [(first, KERNELS[first])]
        assert dict(wheel.texts()) == {
            n: d for n, d in contents.items() if n not in KERNELS
        }
        for name, data in contents.items():
            assert b"".join(wheel.unpacked(name)) == data
            assert sum(map(len, wheel.stored(name))) == raw[name]
        assert wheel.record(f"{HOME}/RECORD").keys() == contents.keys()
        assert read_metadata(wheel).pins == {"torch": "2.10.0"}


def contents_of(path, stream):
    stream.seek(0)
    return path, stream.read()


def test_a_pipe_is_refused_at_once(tmp_path):
    pipe = tmp_path / "a-1.0-py3-none-any.whl"
    os.mkfifo(pipe)
    with pytest.raises(SourceError, match="it is a pipe"):
        WheelFile(pipe)


def test_a_text_that_grows_is_not_opened(tmp_path):
    bomb = vllm_wheel(
        tmp_path, libraries={}, change=lambda m: m.update({"x.json": bytes(90 << 20)})
    )
    with pytest.raises(SourceError, match="makes it more than 100 times as large"):
        WheelFile(bomb)


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
        path = write_zip(
            Path(folder) / "a-1-py3-none-any.whl", files, zipfile.ZIP_DEFLATED
        )
        with WheelFile(path) as wheel:
            assert {name: wheel.read(name) for name in wheel.members} == files
        damaged = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(
                st.integers(0, 255)
            )
        path.write_bytes(damaged)
        with contextlib.suppress(PatchkitError), WheelFile(path) as wheel:
            for name in wheel.members:
                b"".join(wheel.unpacked(name))
                b"".join(wheel.stored(name))
            read_metadata(wheel)
            list(wheel.texts())


TAG = "cp38-abi3-manylinux_2_35_aarch64"


@pytest.fixture
def made(tmp_path):
    def make(files=None, *, project="vllm", tag=TAG, **more):
        return write_wheel(
            tmp_path, "0.25.1", project=project, tag=tag, files=files, **more
        )

    return make


def about(wheel):
    with WheelFile(wheel) as opened:
        return read_metadata(opened)


def found(wheel):
    """Name and complaint of each finding."""
    findings = list(check_wheel(about(wheel), ()))
    assert all(each.kind.exit_code == 3 and each.hint for each in findings)
    return [f"{each.where}: {each.what}" for each in findings]


def test_what_a_wheel_says(made):
    def with_sboms(members, home):
        members |= {
            f"{home}/sboms/{name}.json": b"[]" for name in ("vllm.cdx", "other")
        }

    requires = ["torch==2.11.0", "torchvision (==0.26.0)", "six>=1,<2", "numba==0.65.*"]
    requires += [
        'zentorch==1.0; extra == "zen"',
        'Triton==3.6.0; platform_machine == "aarch64"',
    ]
    wheel = made(
        requires=requires, python=">=3.10", facts={"made": "repack"}, change=with_sboms
    )

    said = about(wheel)

    pins = {"torch": "2.11.0", "torchvision": "0.26.0", "triton": "3.6.0"}
    assert (said.pins, said.decisive_pins) == (pins, pins)
    assert (said.requires_python, said.facts, said.faults) == (
        ">=3.10",
        {"made": "repack"},
        (),
    )
    assert [path.rpartition("/")[2] for path in said.sboms] == [
        "other.json",
        "vllm.cdx.json",
    ]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            lambda m, h: m.update({f"{h}/patchkit.json": b"{"}),
            "patchkit.json: is no JSON: Expect",
        ),
        (
            lambda m, h: m.update({f"{h}/patchkit.json": b"[]"}),
            "patchkit.json: is no JSON object",
        ),
        (
            lambda m, h: m.update({f"{h}/METADATA": b"Requires-Dist: a==\n"}),
            "Dist: Expected",
        ),
        (
            lambda m, h: m.update({f"{h}/METADATA": b"Requires-Python: ten\n"}),
            "specifier: 'ten'",
        ),
    ],
)
def test_what_cannot_be_read_is_said(change, fault, made):
    (said,) = found(made(change=change))
    assert fault in said, said


@pytest.mark.parametrize(
    ("project", "member", "owner"),
    [
        ("vllm", "vllm.libs/libcudart-1a2b3c4d.so.13.0.96", "NVIDIA's wheels"),
        ("vllm", "vllm/lib/libc10.so", "torch"),
        ("nvidia-nccl-cu13", "nvidia/nccl/lib/libcuda.so.1", "the driver"),
        ("nvidia-nccl-cu13", "nvidia/nccl/lib/libnccl.so.2", None),
        ("vllm", "vllm/_C_stable_libtorch.abi3.so", None),
        ("vllm", "vllm.libs/libgomp-d22c30c5.so.1.0.0", None),
    ],
)
def test_private_copies(project, member, owner, made):
    said = found(made({member: b""}, project=project))
    expected = f"{member}: is a private copy of a library of {owner}"
    assert said == ([expected] if owner else [])


@pytest.mark.parametrize(
    ("version", "requires", "cuda"),
    [
        ("2.11.0", ["cuda-toolkit[x]==13.0.2", "nvidia-nccl-cu13==2.28.9"], 13),
        ("2.11.0", ["cuda-bindings<14"], 0),
        ("2.9.0+cu128", ["nvidia-nccl-cu12"], 12),
        ("2.9.0+cpu", ["numpy"], None),
        ("2.10.0", ["numpy", "triton"], None),
    ],
)
def test_which_cuda_a_torch_is_for(version, requires, cuda):
    assert torch_of(Version(version), requires).cuda == cuda
