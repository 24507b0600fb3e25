"""A library holds what its sources were compiled to, or the build says what is missing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from platform import machine

import pytest

from patchkit.errors import ProofError
from patchkit.recipes.vllm.archs import Group
from patchkit.source.fetch import cache_dir
from patchkit.target import Load, targets
from patchkit.wheel.device.compiled import compiled_sources, prove_compiled, prove_groups
from patchkit.wheel.device.inspect import inspect_file

LIBRARIES = Path(__file__).parents[3] / "data" / "libraries"
GB10 = targets()["gb10"]
EXACT = "-gencode arch=compute_121a,code=sm_121a"
PTX = "-gencode arch=compute_89,code=compute_89"
BOTH = f"-gencode arch=compute_89,code=sm_89 {PTX}"


@pytest.fixture
def commands(tmp_path):
    """What CMake would write for sources (file, library, flags); the folder it is in."""

    def write(*sources):
        entries = [
            {
                "file": f"/src/{file}",
                "command": f"nvcc -O2 {flags} -x cu -c /src/{file} "
                f"-o CMakeFiles/{library}.dir/{file}.o",
            }
            for file, library, flags in sources
        ]
        folder = tmp_path / "build" / "temp.linux"
        folder.mkdir(parents=True)
        (folder / "compile_commands.json").write_text(json.dumps(entries))
        return tmp_path / "build"

    return write


def read(folder):
    return compiled_sources(folder, Path("/src"))


def test_sources_and_their_archs(commands):
    found = read(commands(("csrc/a.cu", "_C", EXACT), ("b.cpp", "_C", ""), ("b.cu", "_M", BOTH)))
    codes = {each.source: {(k, a.gencode) for k, a in each.codes} for each in found}
    assert codes == {
        "csrc/a.cu": {("sass", "121a")},
        "b.cu": {("sass", "89"), ("ptx", "89")},
    }
    assert [each.library for each in found] == ["_C", "_M"]
    assert [each.load(GB10) for each in found] == [Load.EXACT, Load.JIT]


@pytest.mark.parametrize(
    ("arch", "flags", "other"),
    [("12.1a", EXACT, BOTH), ("8.9-virtual", PTX, BOTH), ("8.9+PTX", BOTH, PTX)],
)
def test_a_group_is_compiled_to_what_was_proved_and_to_nothing_else(commands, arch, flags, other):
    group = Group(
        place=("CMakeLists.txt", 0), line=7, name="w8a8/a", variable="A", defines=(), archs=(arch,)
    )
    sources = read(commands(("csrc/w8a8/a.cu", "_C", flags), ("csrc/w8a8/b.cu", "_C", other)))
    assert prove_groups([group], sources).startswith("1 kernel groups are compiled")
    with pytest.raises(ProofError, match=r"CMakeLists\.txt:7 says"):
        prove_groups([replace(group, name="w8a8/b")], sources)


# gb10.so: one fat binary with sm_100f and two with sm_121.
LINKED = [
    ("always.cu", "gb10", "-gencode arch=compute_100f,code=sm_100f"),
    ("one.cu", "gb10", "-gencode arch=compute_121,code=sm_121"),
    ("two.cu", "gb10", "-gencode arch=compute_121,code=sm_121"),
]


def test_what_was_compiled_is_linked(commands):
    binaries = inspect_file(LIBRARIES / "gb10.so")
    (said,) = prove_compiled(read(commands(*LINKED)), binaries, GB10)
    assert said == "gb10.so: 2 of 3 CUDA sources are exact for NVIDIA DGX Spark (GB10)"


def test_what_nvcc_does_by_itself_is_what_it_says():
    (nvcc, *_) = *(cache_dir() / "cuda").glob(f"13.0.88-*-on-{machine()}-*/bin/nvcc"), None
    if nvcc is None:
        pytest.skip("the locked nvcc is not in the cache: patchkit build nccl brings it")
    if shutil.which("g++") is None:
        pytest.skip("nvcc names no codes without a host compiler: there is no g++")
    said = subprocess.run(
        [nvcc, "--dryrun", "-c", LIBRARIES / "twice.cu", "-o", "/dev/null"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    archs = set(re.findall(r"--image3=kind=(elf|ptx),sm=(\d+)", said))
    assert archs == {("elf", "75"), ("ptx", "75")}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("three.cu", "gb10", "-gencode arch=compute_121,code=sm_121"), "lacks 1 of 3"),
        (("new.cu", "gb10", EXACT), "lacks 1 of 1 fat binaries with sm_121a, what new.cu"),
        (("lost.cu", "other", EXACT), "other was compiled, and is not in the wheel"),
    ],
)
def test_what_is_missing_is_told(commands, more, said):
    with pytest.raises(ProofError) as failed:
        prove_compiled(read(commands(*LINKED, more)), inspect_file(LIBRARIES / "gb10.so"), GB10)
    assert said in failed.value.what
