"""Which nvcc, runtime and C++ compiler a build gets, and what is said if one is missing."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections import Counter

import pytest

from patchkit.elf import read_library
from patchkit.errors import HostError, PatchkitError, SourceError, UsageError
from patchkit.target import targets
from patchkit.wheel.build import toolchain as module
from patchkit.wheel.build.toolchain import MACHINES, check_toolchain, find_toolchain
from patchkit.wheel.build.toolkit import locked_toolkit_wheels
from support.needed import need

HERE = platform.machine()
THERE = next(machine for machine in MACHINES if machine != HERE)
GENCODE = "-gencode=arch=compute_121,code=sm_121"
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
    for name in ("CUDA_HOME", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "USUAL", tmp_path / "usual")
    return programs


@pytest.fixture
def toolkit(tmp_path):
    """A folder that looks like a toolkit, with an nvcc that prints: ``toolkit("12.9.86")``."""

    def make(version=None, *, name="cuda", says=None, without=()):
        home = tmp_path / name
        release = (version or "").rpartition(".")[0]
        text = says or f"Cuda compilation tools, release {release}, V{version}"
        for path, content in {
            "bin/nvcc": f"#!/bin/sh\necho '{text}'\n",
            "include/cuda_runtime.h": "",
            "lib64/libcudart_static.a": "",
        }.items():
            if path not in without:
                (home / path).parent.mkdir(parents=True, exist_ok=True)
                (home / path).write_text(content)
                (home / path).chmod(0o755)
        return home

    return make


# A toolkit that is there


@pytest.mark.parametrize("version", ["13.0.88", "13.3.1"])
def test_a_toolkit_that_is_named(bare, toolkit, version):
    home = toolkit(version)
    found = find_toolchain(HERE, toolkit=home)
    assert (found.nvcc, found.cuda, found.locked) == (home / "bin/nvcc", version, False)
    assert (found.include, found.lib) == (home / "include", home / "lib64")
    assert found.cxx == bare / "g++"
    assert found.compiler.startswith("g++ ")
    assert found.machine == HERE


@pytest.mark.parametrize(
    ("version", "options", "says"),
    [
        ("12.9.86", {}, "is CUDA 12.9.86; CUDA 13.0 or a later 13.x is needed"),
        ("14.0.1", {}, "is CUDA 14.0.1; CUDA 13.0 or"),
        ("13.0.88", {"without": ["bin/nvcc"]}, "no CUDA toolkit: bin/nvcc is missing"),
        ("13.0.88", {"without": ["include/cuda_runtime.h"]}, "include/cuda_runtime.h is missing"),
    ],
)
def test_a_toolkit_that_does_not_fit(bare, toolkit, version, options, says):
    with pytest.raises(UsageError, match=re.escape(says)) as refused:
        find_toolchain(HERE, toolkit=toolkit(version, **options))
    if "or a later" in says:
        assert "another major version is another ABI" in refused.value.why
        assert "--cuda locked" in refused.value.hint


def test_no_toolkit_offline_and_none_in_the_cache(bare, tmp_path):
    with pytest.raises(SourceError) as absent:
        find_toolchain(HERE, offline=True)
    assert re.match(r"nvidia_cuda_nvcc-13.*\.whl is not in the cache", absent.value.what)
    assert absent.value.hint
    assert not (tmp_path / "cache/cuda").exists()


def test_a_toolkit_cannot_link_for_another_cpu(bare, toolkit):
    (bare / f"{THERE}-linux-gnu-g++").symlink_to(bare / "g++")
    with pytest.raises(UsageError, match=f"cannot link for {THERE}"):
        find_toolchain(THERE, toolkit=toolkit("13.0.88"))


# Compilers and tools


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
def test_what_is_missing_and_its_package(bare, toolkit, missing, machine, package):
    if missing:
        (bare / missing).unlink()
    with pytest.raises(HostError, match="is not on this machine") as absent:
        find_toolchain(machine)
    assert (absent.value.hint, absent.value.exit_code) == (package, 9)


# Whether it compiles


@pytest.fixture(scope="session")
def real():
    """A real toolchain for a CPU, or a skip that says why there is none."""

    def find(machine, **how):
        try:
            return find_toolchain(machine, **how)
        except PatchkitError as error:
            return pytest.skip(f"{error.what}; {error.hint}")

    return find


@pytest.mark.parametrize(
    ("machine", "locked"),
    [(HERE, False), (HERE, True), (THERE, True)],
    ids=["any", "locked", "cross"],
)
def test_it_compiles_and_links(real, tmp_path, machine, locked):
    tools = real(machine, locked=locked)
    check_toolchain(tools, GENCODE, tmp_path)
    program = read_library(tmp_path / "check")
    assert program.machine == machine
    assert not [name for name in program.needed if "cuda" in name]
    if locked:
        assert tools.cuda.startswith("13.0.")
        assert tools.locked
    if machine != HERE:
        emulator, root = shutil.which(f"qemu-{machine}-static"), f"/usr/{machine}-linux-gnu"
        if emulator is None:
            pytest.skip(f"it compiles and links for {machine}; there is no qemu to run it")
        command = [emulator, "-L", root, str(tmp_path / "check")]
        assert subprocess.run(command, capture_output=True).returncode == 0


def test_a_compiler_that_nvcc_does_not_take(real, tmp_path, monkeypatch):
    """Its own words are shown. nvcc looks at the version that the compiler's macros tell."""
    new = tmp_path / "g++-99"
    new.write_text('#!/bin/sh\nexec g++ -U__GNUC__ -D__GNUC__=99 "$@"\n')
    new.chmod(0o755)
    monkeypatch.setenv("CXX", str(new))
    with pytest.raises(HostError, match="unsupported GNU version") as refused:
        check_toolchain(real(HERE), GENCODE, tmp_path)
    assert "cannot compile for -gencode=arch=compute_121" in refused.value.what
    assert "CXX names another g++" in refused.value.hint


# The lock


def test_the_locked_wheels():
    wheels = locked_toolkit_wheels()
    assert {wheel.machine for wheel in wheels} == {*MACHINES}
    assert max(Counter(wheel.filename for wheel in wheels).values()) == 1
    assert max(Counter(wheel.sha256 for wheel in wheels).values()) == 1
    sides = [
        {(w.project, w.version, w.role) for w in wheels if w.machine == machine}
        for machine in MACHINES
    ]
    assert sides[0] == sides[1]
    assert len(sides[0]) * 2 == len(wheels)
    for wheel in wheels:
        assert re.fullmatch(r"[0-9a-f]{64}", wheel.sha256)
        assert 10_000 < wheel.size < 100_000_000
        assert wheel.role in ("compiler", "runtime")
        project, version, *_, platforms = wheel.filename.removesuffix(".whl").split("-")
        assert (project.replace("_", "-"), version) == (wheel.project, wheel.version)
        assert platforms.endswith(f"_{wheel.machine}")


def test_the_locked_toolkit_is_of_the_targets_cuda():
    """One release for compiler and runtime, and the one that the targets ask for."""
    releases = {wheel.version.rpartition(".")[0] for wheel in locked_toolkit_wheels()}
    assert releases == {target.cuda for target in targets().values()}
