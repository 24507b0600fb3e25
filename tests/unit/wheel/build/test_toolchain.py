"""The tools that a build gets, and what is said, all at once, of what is missing."""

import os
import platform
import re
import shutil
from collections import Counter
from dataclasses import replace

import pytest
from packaging.version import Version

from patchkit.errors import HostError, SourceError
from patchkit.process import run
from patchkit.recipes.vllm.build import Needs, read_needs, recorded_needs
from patchkit.target import targets, toolkits
from patchkit.wheel.build.machine import (
    COMPILER,
    MACHINES,
    check_toolchain,
    find_toolchain,
    locked_toolkit_wheels,
    missing_needs,
)
from support import write_files
from support.needed import need, need_headers, need_toolchain

HERE = platform.machine()
THERE = next(machine for machine in MACHINES if machine != HERE)
TOOLS = ("make", "bash", "python3", "g++", "sed")


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine without CUDA and without a cache: only what is put into ``bare`` is on PATH."""
    need(*TOOLS)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in TOOLS:
        (programs / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("PATCHKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return programs


def test_no_toolkit_offline_and_none_in_the_cache(bare, tmp_path):
    with pytest.raises(SourceError) as absent:
        find_toolchain(HERE, toolkits()[0].cuda, offline=True)
    assert re.match(
        r"nvidia_cuda_nvcc-13.*\.whl is not in the cache", absent.value.what
    )
    assert absent.value.hint
    assert not (tmp_path / "cache/cuda").exists()


@pytest.mark.parametrize(
    ("missing", "machine", "package"),
    [
        ("g++", HERE, "apt install g++"),
        ("make", HERE, "apt install make"),
        (None, THERE, f"apt install g++-{THERE.replace('_', '-')}-linux-gnu"),
    ],
)
def test_what_is_missing_and_its_package(bare, missing, machine, package):
    if missing:
        (bare / missing).unlink()
    with pytest.raises(HostError, match="is not on this machine") as absent:
        find_toolchain(machine, toolkits()[0].cuda)
    assert (absent.value.hint, absent.value.exit_code) == (package, 9)


def test_a_compiler_that_nvcc_does_not_take(tmp_path, monkeypatch):
    """Its own words are shown. nvcc looks at the version that the compiler's macros tell."""
    new = '#!/bin/sh\nexec g++ -U__GNUC__ -D__GNUC__=99 "$@"\n'
    write_files(tmp_path, {"g++-99": new}, mode=0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "g++-99"))
    tools = need_toolchain(HERE)
    with pytest.raises(HostError, match="unsupported GNU version") as refused:
        check_toolchain(
            tools, "-gencode=arch=compute_121,code=sm_121", tmp_path, os.environ
        )
    assert "cannot compile for -gencode=arch=compute_121" in refused.value.what
    assert "CXX names another g++" in refused.value.hint


def test_the_locked_wheels():
    """Both CPUs have the same of them, of each CUDA; the targets ask for the oldest."""
    wheels = locked_toolkit_wheels()
    both = Counter((it.cuda, it.project, it.version, it.role) for it in wheels)
    assert {*both.values()} == {len(MACHINES)}
    assert len({wheel.sha256 for wheel in wheels}) == len(wheels)
    for wheel in wheels:
        project, version, *_, platforms = wheel.filename.removesuffix(".whl").split("-")
        assert (project.replace("_", "-"), version) == (wheel.project, wheel.version)
        assert platforms.endswith(f"_{wheel.machine}")
    assert len({(it.cuda, it.project) for it in wheels}) == len(toolkits()) * len(
        {it.project for it in wheels}
    )
    assert {target.cuda for target in targets().values()} == {toolkits()[0].cuda}


@pytest.mark.parametrize("row", toolkits(), ids=lambda row: row.cuda)
def test_what_a_row_says_of_its_nvcc(row, tmp_path):
    tools = need_toolchain(HERE, row)
    assert {it.version for it in locked_toolkit_wheels() if it.project == COMPILER} >= {
        tools.cuda
    }
    source, ptx = tmp_path / "x.cu", tmp_path / "x.ptx"
    source.write_text("__global__ void kernel() {}\n")
    command = tools.nvcc, "-ccbin", tools.cxx, f"-I{tools.include}", source
    run(*command, "-ptx", "-o", ptx, timeout=None)
    assert f"\n.version {row.ptx[0]}.{row.ptx[1]}\n" in ptx.read_text()
    steps = run(*command, "-c", "--dryrun", timeout=None).errors
    assert set(re.findall(r"\b(?:sm|compute)_\d+", steps)) == {*row.default_codes}


@pytest.mark.parametrize(
    ("torch", "cuda"),
    [
        ("2.9.0", "13.0"),
        ("2.11.0+cu130", "13.0"),
        ("2.14.1", "13.0"),
        ("2.15.0", "13.2"),
    ],
)
def test_a_torch_has_the_cuda_of_its_row(torch, cuda):
    """A later one has at least that of the newest row."""
    target = targets()["gb10"].with_torch(torch)
    assert (target.cuda, target.cuda_tag) == (cuda, f"cu{cuda.replace('.', '')}")


EASY = Needs(torch="2.11.0", python=">=3.11", standard=17, gcc="", patch=False, rust="")
HARD = recorded_needs(Version("0.28.0"))


def gcc(folder, version):
    script = f"#!/bin/sh\n[ $1 = -dumpfullversion ] && echo {version}\n"
    return write_files(folder, {"g++": script}, mode=0o755) / "g++"


def said_of(*arguments, **options):
    return [
        f"{found.what}: {found.hint}" for found in missing_needs(*arguments, **options)
    ]


def test_another_cpu_takes_the_compiler_for_it(tmp_path):
    needed = replace(EASY, gcc="13", standard=20)
    said = "\n".join(said_of(needed, gcc(tmp_path, "12.2.0"), across="aarch64"))
    assert "apt install g++-13-aarch64-linux-gnu (Debian 13, Ubuntu 24.04)" in said
    assert "then CXX=aarch64-linux-gnu-g++-13" in said


def test_a_compiler_that_tells_no_version_is_not_judged(tmp_path):
    said = said_of(replace(EASY, gcc="13"), gcc(tmp_path, "-dumpfullversion"))
    assert not [line for line in said if "GCC" in line]


def test_all_that_is_missing_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    needed = replace(HARD, gcc="13", python=">=3.99,<4")
    said = "\n".join(said_of(needed, gcc(tmp_path, "12.2.0")))
    assert "is outside >=3.99,<4: install patchkit into another one" in said
    assert (
        "is GCC 12.2.0; the release takes C++20, GCC 13 or later: apt install g++-13"
        in said
    )
    assert "no program `patch`: apt install patch" in said


@pytest.mark.parametrize(
    ("standard", "least", "found", "fine"),
    [
        (20, "", "9.4.0", False),
        (20, "", "10.1.0", True),
        (20, "11.3", "11.3.0", True),
        (20, "11.3", "9.0.0", False),  # as text it would be the later one
    ],
)
def test_the_gate_of_gcc(tmp_path, standard, least, found, fine):
    need_headers()
    said = said_of(replace(EASY, standard=standard, gcc=least), gcc(tmp_path, found))
    assert said == [] if fine else f"GCC {found}" in said[0]


def test_another_tree_names_its_own_torch(make_tree):
    texts = {
        "pyproject.toml": '[build-system]\nrequires = ["cmake", "torch == 2.15.0"]\n'
    }
    found = read_needs(make_tree("0.34.0.dev1", texts))
    assert found == replace(recorded_needs(Version("0.34.0")), torch="2.15.0")
