"""`patchkit build vllm`, from small stand-ins of vLLM and of torch to a wheel, for either CPU.

The stand-in in tests/data/vllm_small brings a build backend of its own; the compilers are real.
torch, CUDA's libraries and the build's tools come from wheels in a folder, locked by hash as the
real ones are. Real releases are compiled by `nox -s build-proof`.
"""

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

from patchkit.edit.splice import git_diff
from patchkit.elf import read_dynamic
from patchkit.wheel.wheelhouse.verify import check_files
from support.building import HERE, SMALL_VLLM, TORCH, VLLM_VERSION, wheels
from support.comparing import first_member
from support.needed import need, need_headers
from support.small_torch import HEADERS, LIBRARIES
from support.wheels import write_wheel

pytestmark = pytest.mark.e2e

COMPILERS = {HERE: "g++", "aarch64": "aarch64-linux-gnu-g++"}
# As users have them: they would lead to other compilers, or to another toolkit.
ELSEWHERE = {
    "CXXFLAGS": "-O0",
    "LDFLAGS": "-Wl,--no-such-option",
    "CUDAHOSTCXX": "/usr/bin/g++",
    "NVCC_CCBIN": "/usr/bin/g++",
    "CUDA_HOME": "/usr/local/nowhere",
    "CMAKE_TOOLCHAIN_FILE": "/nowhere.cmake",
    "CPATH": "/usr/include/x86_64-linux-gnu",
    "PYTHONPATH": "/nowhere",
}


@pytest.fixture(scope="module")
def project():
    return "vllm"


@pytest.fixture
def lock(tmp_path, environment):
    """A lock of small wheels for a CPU, which pip finds in a folder: its path."""

    def make(machine, *, cuda="13.2", spoil=""):
        need(COMPILERS[machine], "g++")
        shutil.rmtree(tmp_path / "links", ignore_errors=True)
        path = tmp_path / "library.so"
        compiler = COMPILERS[machine]
        command = [compiler, "-shared", "-nostdlib", "-x", "c", "/dev/null", "-o", path]
        subprocess.run(command, check=True)
        version = f"__version__ = {TORCH + '+cu132'!r}\ncuda = {cuda!r}\nhip = None\nxpu = None\n"
        own = "from torch import version\nfrom torch.version import __version__\n"
        files = {
            "torch/__init__.py": (
                own if machine == HERE else "raise SystemExit('run')"
            ).encode(),
            "torch/version.py": version.encode(),
            "torch/lib/libtorch.so": path.read_bytes(),
            "torch/utils/cpp_extension.py": b"COMMON_NVCC_FLAGS = []\n",
        }
        tag, links = f"py3-none-manylinux_2_28_{machine}", tmp_path / "links"
        beside = {
            f"nvidia/cu13/lib/lib{name}.so.13": path.read_bytes() for name in LIBRARIES
        }
        beside |= {f"nvidia/cu13/include/{name}": b"" for name in HEADERS}
        tools = (
            "cmake",
            "jinja2",
            "ninja",
            "packaging",
            "setuptools",
            "setuptools-rust",
        )
        made = [
            write_wheel(links, TORCH, project="torch", tag=tag, files=files),
            write_wheel(links, "13.0", project="nvidia-cublas", tag=tag, files=beside),
            *(
                write_wheel(links, "1.0", project=name, tag="py3-none-any")
                for name in tools
            ),
        ]
        lines = []
        for wheel in made:
            name, number = wheel.name.split("-")[:2]
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            lines.append(f"{name.replace('_', '-')}=={number} --hash=sha256:{digest}\n")
            if name == spoil:  # half of a download
                wheel.write_bytes(wheel.read_bytes()[: wheel.stat().st_size // 2])
        place = tmp_path / "lock.txt"
        place.write_text("".join(lines))
        return place

    return make


@pytest.fixture
def arguments(toolchain, tmp_path):
    """A build for an H200, whose fixes do not need the files of a real release."""

    def make(lock, machine=HERE, *, sources=SMALL_VLLM, house="house"):
        need_headers()
        toolchain(machine)
        what = [
            "--src",
            sources,
            "--target",
            "h200",
            "--extensions",
            "small_C",
            "--jobs",
            1,
        ]
        return [
            *what,
            "--cpu",
            machine,
            "--requirements",
            lock,
            "--dir",
            tmp_path / house,
        ]

    return make


@pytest.fixture
def offline(tmp_path):
    return {"PIP_FIND_LINKS": str(tmp_path / "links"), "PIP_NO_INDEX": "1"}


@pytest.mark.parametrize("machine", sorted(COMPILERS))
def test_from_sources_to_a_wheel(build, arguments, lock, offline, tmp_path, machine):
    locked, patch = lock(machine), tmp_path / "1.diff"
    stock = (SMALL_VLLM / "vllm/__init__.py").read_text()
    patch.write_text(git_diff("vllm/__init__.py", stock, f"NEW = 1\n{stock}"))
    said = build(*arguments(locked, machine), "--patch", patch, "--json", env=offline)
    made = json.loads(said.stdout)
    facts = made["facts"]
    (wheel,) = wheels(tmp_path / "house")
    assert made["wheel"] == str(wheel)
    assert made["proofs"] == [
        "1 kernel groups are compiled for the archs that were proved",
        f"1 fat binaries are assembled from PTX, by ptxas {facts['cuda']}",
    ]
    assert list(facts["native"]["assembled"]) == ["vllm/ptx_C.abi3.so"]
    assert wheel.name.startswith(f"vllm-{VLLM_VERSION}+cu132.h200.reduced.")
    assert wheel.name.endswith(f"_{machine}.whl")
    assert (facts["machine"], facts["built_on"]) == (machine, HERE)
    assert facts["environment"]["torch"] == f"{TORCH}+cu132, CUDA 13.2"
    digest = hashlib.sha256(locked.read_bytes()).hexdigest()
    assert facts["environment"]["requirements"] == f"sha256:{digest}"
    assert facts["tools"] == {"cmake": "1.0", "ninja": "1.0"}
    (network,) = made["circumstances"]
    assert "cut off from the network" in network

    # What the backend warns of is in the log, and nowhere else.
    log = Path(made["log"]).read_text()
    assert re.search(r"backend/small\.py:\d+: UserWarning: a word of the backend", log)
    assert "a word of the backend" not in said.stderr

    home = f"vllm-{facts['wheel']}.dist-info"
    with ZipFile(wheel) as bundle:
        assert json.loads(bundle.read(f"{home}/patchkit.json")) == facts
        library = Path(bundle.extract("vllm/small_C.abi3.so", tmp_path / "unpacked"))
        assert bundle.read("vllm/__init__.py").startswith(b"NEW = 1\n")
    assert [it["id"] for it in facts["patches"]] == ["patch-1"]
    assert read_dynamic(library).machine == machine
    assert check_files(tmp_path / "house") == ()

    # By another user's settings, in another folder: the same bytes.
    again = [*arguments(locked, machine, house="again"), "--patch", patch]
    build(
        *again,
        "--fresh",
        env={**ELSEWHERE, **offline},
        umask=0o077,
        work=tmp_path / "other",
    )
    assert first_member(wheel, wheels(tmp_path / "again")[0]) == ""


@pytest.mark.skipif(HERE != "x86_64", reason="the toolkit for another CPU is x86-64's")
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"cuda": None}, "no CUDA: it is for CPUs alone"),
        (
            {"spoil": "nvidia_cublas"},
            "the index delivers other bytes than those that are locked",
        ),
    ],
)
def test_a_target_that_does_not_fit(
    build, arguments, lock, offline, tmp_path, how, words
):
    wanted = arguments(lock("aarch64", **how), "aarch64")
    assert words in build(*wanted, rc=10, env=offline).stderr
    assert wheels(tmp_path / "house") == []
    # What did not fit is not taken for good by the next run.
    if how.get("spoil"):
        build(*arguments(lock("aarch64"), "aarch64"), env=offline)
        assert len(wheels(tmp_path / "house")) == 1


@pytest.mark.parametrize(
    ("path", "before", "after", "rc", "says"),
    [
        (
            "csrc/small.cpp",
            "42",
            "where_is_it",
            10,
            "error: 'where_is_it' was not declared",
        ),
        (
            "backend/small.py",
            "other_C.dir",
            "small_C.dir",
            5,
            "lacks 1 of 1 fat binaries with",
        ),
        (
            "backend/small.py",
            "code=sm_90a",
            "code=sm_90",
            5,
            "is compiled for sm_90, and CMake",
        ),
    ],
)
def test_a_build_that_fails(
    build, arguments, lock, sources, offline, tmp_path, path, before, after, rc, says
):
    wanted = arguments(lock(HERE), sources=sources(path, before, after))
    assert says in build(*wanted, rc=rc, env=offline).stderr
    assert wheels(tmp_path / "house") == []
