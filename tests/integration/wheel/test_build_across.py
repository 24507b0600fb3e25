"""`patchkit build vllm` on x86-64 for aarch64, from small stand-ins of vLLM and the target's torch.

The compilers are real. torch, CUDA's libraries and the build's tools come from wheels in a folder,
locked by hash as the real ones are; real releases are compiled by `nox -s build-proof`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

from patchkit.elf import read_dynamic
from patchkit.wheel.build.full_toolkit import HEADERS, LIBRARIES
from patchkit.wheel.wheelhouse.verify import check_files
from support.building import (
    HERE,
    SMALL_VLLM,
    TORCH,
    VLLM_VERSION,
    wheels,
)
from support.comparing import first_member
from support.needed import need, need_headers
from support.wheels import write_wheel

CROSS = "aarch64-linux-gnu-g++"
SBSA = "py3-none-manylinux_2_28_aarch64"
# As users have them: they would lead to this machine's compilers, or to another toolkit.
ELSEWHERE = {
    "CXX": "g++",
    "CC": "gcc",
    "CUDAHOSTCXX": "/usr/bin/g++",
    "NVCC_CCBIN": "/usr/bin/g++",
    "NVCC_PREPEND_FLAGS": "--no-such-flag",
    "CUDA_HOME": "/usr/local/nowhere",
    "CMAKE_TOOLCHAIN_FILE": "/nowhere.cmake",
    "CPATH": "/usr/include/x86_64-linux-gnu",
    "PYTHONPATH": "/nowhere",
}

pytestmark = pytest.mark.skipif(HERE != "x86_64", reason="the toolkit for another CPU is x86-64's")


@pytest.fixture(scope="module")
def project():
    return "vllm"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A library of each CPU, by its name."""
    need(CROSS, "g++")
    folder, found = tmp_path_factory.mktemp("libraries"), {}
    for machine, compiler in (("aarch64", CROSS), ("x86_64", "g++")):
        path = folder / f"{machine}.so"
        command = [compiler, "-shared", "-nostdlib", "-x", "c", "/dev/null", "-o", path]
        subprocess.run(command, check=True)
        found[machine] = path.read_bytes()
    return found


@pytest.fixture
def lock(library, tmp_path, environment):
    """A lock of small wheels, which pip finds in a folder: its path."""

    def make(*, cuda="13.0", torch=TORCH, of="aarch64", spoil=""):
        shutil.rmtree(tmp_path / "links", ignore_errors=True)
        text = f"__version__ = {torch + '+cu130'!r}\ncuda = {cuda!r}\nhip = None\nxpu = None\n"
        files = {
            "torch/__init__.py": b"raise SystemExit('it was executed')\n",
            "torch/version.py": text.encode(),
            "torch/lib/libtorch.so": library[of],
        }
        beside = {f"nvidia/cu13/lib/lib{name}.so.13": library["aarch64"] for name in LIBRARIES}
        beside |= {f"nvidia/cu13/include/{name}": b"" for name in HEADERS}
        made = [
            write_wheel(tmp_path / "links", torch, project="torch", tag=SBSA, files=files),
            write_wheel(
                tmp_path / "links", "13.0", project="nvidia-cublas", tag=SBSA, files=beside
            ),
        ]
        tools = ("cmake", "jinja2", "ninja", "packaging", "setuptools", "setuptools-rust")
        made += [
            write_wheel(tmp_path / "links", "1.0", project=name, tag="py3-none-any")
            for name in (*tools, "setuptools-scm")
        ]
        lines = []
        for wheel in made:
            name, version = wheel.name.split("-")[:2]
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            lines.append(f"{name.replace('_', '-')}=={version} --hash=sha256:{digest}\n")
            if name == spoil:  # half of a download
                wheel.write_bytes(wheel.read_bytes()[: wheel.stat().st_size // 2])
        path = tmp_path / "lock.txt"
        path.write_text("".join(lines))
        return path

    return make


@pytest.fixture
def arguments(tmp_path):
    """Arguments of a build whose device has no fix that needs files of a real release."""

    def make(lock, *more, house="house"):
        what = ["--src", SMALL_VLLM, "--target", "h200", "--extensions", "small_C"]
        return [*what, "--cpu", "aarch64", "--requirements", lock, *more, "--dir", tmp_path / house]

    return make


@pytest.fixture
def offline(toolchain, tmp_path):
    """The variables with which pip finds nothing but the wheels of the lock."""
    need_headers()
    toolchain("aarch64")
    return {"PIP_FIND_LINKS": str(tmp_path / "links"), "PIP_NO_INDEX": "1"}


@pytest.fixture
def across(build, arguments, offline):
    """Build for Arm."""

    def run(lock, *more, house="house", env=None, **how):
        return build(*arguments(lock, *more, house=house), env={**offline, **(env or {})}, **how)

    return run


@pytest.mark.e2e
def test_a_wheel_for_another_cpu(across, lock, tmp_path):
    locked = lock()
    made = json.loads(across(locked, "--json").stdout)
    facts, (wheel,) = made["facts"], wheels(tmp_path / "house")
    assert wheel.name.startswith(f"vllm-{VLLM_VERSION}+cu130.h200.reduced.")
    assert wheel.name.endswith("_aarch64.whl")
    assert (facts["machine"], facts["built_on"]) == ("aarch64", "x86_64")
    assert facts["environment"]["torch"] == f"{TORCH}+cu130, CUDA 13.0"
    assert facts["environment"]["requirements"].removeprefix("sha256:") == (
        hashlib.sha256(locked.read_bytes()).hexdigest()
    )
    with ZipFile(wheel) as file:
        library = Path(file.extract("vllm/small_C.abi3.so", tmp_path / "unpacked"))
    assert read_dynamic(library).machine == "aarch64"
    assert check_files(tmp_path / "house") == ()

    # By another user's settings, in another folder, with other jobs: the same bytes.
    across(
        *(locked, "--fresh", "--jobs", 1),
        house="again",
        env={**ELSEWHERE, "TZ": "Asia/Tokyo"},
        umask=0o077,
        work=tmp_path / "other",
    )
    assert first_member(wheel, wheels(tmp_path / "again")[0]) == ""


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("how", "rc", "words"),
    [
        ({"cuda": None}, 10, "no CUDA: it is for CPUs alone"),
        ({"torch": "2.9.9"}, 10, f"torch is 2.9.9+cu130 with CUDA 13.0; wanted: {TORCH}"),
        ({"of": "x86_64"}, 10, "torch/lib/libtorch.so is for x86_64, not for aarch64"),
        (
            {"spoil": "nvidia_cublas"},
            10,
            "the index delivers other bytes than those that are locked",
        ),
    ],
    ids=["for CPUs", "another version", "another CPU", "half a download"],
)
def test_a_target_that_does_not_fit(across, lock, tmp_path, how, rc, words):
    said = across(lock(**how), rc=rc).stderr
    assert words in said
    assert wheels(tmp_path / "house") == []
    # What did not fit is not taken for good by the next run.
    if how.get("spoil"):
        across(lock())
        assert len(wheels(tmp_path / "house")) == 1
