"""Which nvcc, runtime and C++ compiler a build gets, and what is said if one is missing."""

from __future__ import annotations

import platform
import re
import shutil
from collections import Counter

import pytest

from patchkit.errors import HostError, PatchkitError, SourceError
from patchkit.target import targets
from patchkit.wheel.build.toolchain import (
    MACHINES,
    check_toolchain,
    find_toolchain,
    locked_toolkit_wheels,
)
from support.needed import need

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
        find_toolchain(HERE, offline=True)
    assert re.match(r"nvidia_cuda_nvcc-13.*\.whl is not in the cache", absent.value.what)
    assert absent.value.hint
    assert not (tmp_path / "cache/cuda").exists()


@pytest.mark.parametrize(
    ("missing", "machine", "package"),
    [
        ("g++", HERE, "apt install g++"),
        ("make", HERE, "apt install make"),
        ("bash", HERE, "apt install bash"),
        ("python3", HERE, "apt install python3"),
        (None, THERE, f"apt install g++-{THERE.replace('_', '-')}-linux-gnu"),
    ],
)
def test_what_is_missing_and_its_package(bare, missing, machine, package):
    if missing:
        (bare / missing).unlink()
    with pytest.raises(HostError, match="is not on this machine") as absent:
        find_toolchain(machine)
    assert (absent.value.hint, absent.value.exit_code) == (package, 9)


def test_a_compiler_that_nvcc_does_not_take(tmp_path, monkeypatch):
    """Its own words are shown. nvcc looks at the version that the compiler's macros tell."""
    new = tmp_path / "g++-99"
    new.write_text('#!/bin/sh\nexec g++ -U__GNUC__ -D__GNUC__=99 "$@"\n')
    new.chmod(0o755)
    monkeypatch.setenv("CXX", str(new))
    try:
        tools = find_toolchain(HERE)
    except PatchkitError as error:
        pytest.skip(f"{error.what}; {error.hint}")
    with pytest.raises(HostError, match="unsupported GNU version") as refused:
        check_toolchain(tools, "-gencode=arch=compute_121,code=sm_121", tmp_path)
    assert "cannot compile for -gencode=arch=compute_121" in refused.value.what
    assert "CXX names another g++" in refused.value.hint


def test_the_locked_wheels():
    """Both CPUs have the same of them, of one release: the one that the targets ask for."""
    wheels = locked_toolkit_wheels()
    both = Counter((wheel.project, wheel.version, wheel.role) for wheel in wheels)
    assert {*both.values()} == {len(MACHINES)}
    assert len({wheel.sha256 for wheel in wheels}) == len(wheels)
    for wheel in wheels:
        project, version, *_, platforms = wheel.filename.removesuffix(".whl").split("-")
        assert (project.replace("_", "-"), version) == (wheel.project, wheel.version)
        assert platforms.endswith(f"_{wheel.machine}")
    releases = {wheel.version.rpartition(".")[0] for wheel in wheels}
    assert releases == {target.cuda for target in targets().values()}
