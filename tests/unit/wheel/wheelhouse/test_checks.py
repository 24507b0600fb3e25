"""What a wheel says of itself, and what speaks against it."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from patchkit.wheel.device.inspect import inspect_file
from patchkit.wheel.device.wheel_checks import check_wheel
from patchkit.wheel.file.metadata import read_metadata
from patchkit.wheel.file.torch import torch_of
from patchkit.wheel.file.wheelfile import WheelFile
from support.wheels import write_wheel

LIBRARIES = Path(__file__).parents[3] / "data" / "libraries"
TAG = "cp38-abi3-manylinux_2_35_aarch64"


def data(name):
    return (LIBRARIES / f"{name}.so").read_bytes()


@pytest.fixture
def made(tmp_path):
    def make(files=None, *, project="vllm", tag=TAG, **more):
        return write_wheel(tmp_path, "0.25.1", project=project, tag=tag, files=files, **more)

    return make


def about(wheel):
    with WheelFile(wheel) as opened:
        return read_metadata(opened)


def found(wheel, binaries=None):
    """Name and complaint of each finding."""
    binaries = inspect_file(wheel) if binaries is None else binaries
    findings = list(check_wheel(about(wheel), binaries))
    assert all(each.kind.exit_code == 3 and each.hint for each in findings)
    return [f"{each.where}: {each.what}" for each in findings]


def test_what_a_wheel_says(made):
    def with_sboms(members, home):
        members |= {f"{home}/sboms/{name}.json": b"[]" for name in ("vllm.cdx", "other")}

    requires = ["torch==2.11.0", "torchvision (==0.26.0)", "numpy", "six>=1,<2", "numba==0.65.*"]
    requires += ['zentorch==1.0; extra == "zen"', 'Triton==3.6.0; platform_machine == "aarch64"']
    wheel = made(requires=requires, python=">=3.10", facts={"made": "repack"}, change=with_sboms)

    said = about(wheel)

    pins = {"torch": "2.11.0", "torchvision": "0.26.0", "triton": "3.6.0"}
    assert (said.pins, said.decisive_pins) == (pins, pins)
    assert (said.requires_python, said.facts, said.faults) == (">=3.10", {"made": "repack"}, ())
    assert [path.rpartition("/")[2] for path in said.sboms] == ["other.json", "vllm.cdx.json"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda m, h: m.update({f"{h}/patchkit.json": b"{"}), "patchkit.json: is no JSON: Expect"),
        (lambda m, h: m.update({f"{h}/patchkit.json": b"[]"}), "patchkit.json: is no JSON object"),
        (
            lambda m, h: m.update({f"{h}/METADATA": b"Requires-Dist: a==\n"}),
            "Requires-Dist: Expected",
        ),
        (
            lambda m, h: m.update({f"{h}/METADATA": b"Requires-Python: ten\n"}),
            "Invalid specifier: 'ten'",
        ),
    ],
)
def test_what_cannot_be_read_is_said(change, fault, made):
    (said,) = found(made(change=change), binaries=())
    assert fault in said, said


@pytest.mark.parametrize(
    ("project", "member", "owner"),
    [
        ("vllm", "vllm.libs/libcudart-1a2b3c4d.so.13.0.96", "NVIDIA's wheels"),
        ("vllm", "vllm/libcublasLt.so.13", "NVIDIA's wheels"),
        ("vllm", "vllm/lib/libc10.so", "torch"),
        ("nvidia-nccl-cu13", "nvidia/nccl/lib/libcuda.so.1", "the driver"),
        ("nvidia-nccl-cu13", "nvidia/nccl/lib/libnccl.so.2", None),
        ("vllm", "vllm/_C_stable_libtorch.abi3.so", None),
        ("vllm", "vllm.libs/libgomp-d22c30c5.so.1.0.0", None),
    ],
)
def test_private_copies(project, member, owner, made):
    said = found(made({member: b""}, project=project), binaries=())
    expected = f"{member}: is a private copy of a library of {owner}"
    assert said == ([expected] if owner else [])


@pytest.mark.parametrize(
    ("version", "requires", "cuda"),
    [
        ("2.11.0", ["cuda-toolkit[x]==13.0.2", "nvidia-nccl-cu13==2.28.9"], 13),
        ("2.11.0", ["cuda-bindings<14"], 0),
        ("2.9.0+cu130", ["numpy"], 13),
        ("2.9.0+cu128", ["nvidia-nccl-cu12"], 12),
        ("2.9.0+cpu", ["numpy"], None),
        ("2.10.0", ["numpy", "triton"], None),
    ],
)
def test_which_cuda_a_torch_is_for(version, requires, cuda):
    assert torch_of(Version(version), requires).cuda == cuda
