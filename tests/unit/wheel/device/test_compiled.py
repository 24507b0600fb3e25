"""A library holds what its sources were compiled to, and serves a device or is missed."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from patchkit.errors import ProofError
from patchkit.patching.recipe import load_recipe
from patchkit.recipes.vllm.archs import Group
from patchkit.target import Load, targets
from patchkit.wheel.device.inspect import inspect_file, inspect_wheel
from patchkit.wheel.device.libraries import (
    Use,
    compiled_sources,
    judge_libraries,
    library_table,
    prove_compiled,
    prove_groups,
    require_loading,
)
from patchkit.wheel.file.wheelfile import WheelFile, WheelName
from support.vllm_wheels import HOPPER, KERNELS, LOST, NAME, vllm_wheel

LIBRARIES = Path(__file__).parents[3] / "data" / "libraries"
GB10, THOR, H200 = (targets()[name] for name in ("gb10", "thor", "h200"))
EXACT = "-gencode arch=compute_121a,code=sm_121a"
PTX = "-gencode arch=compute_89,code=compute_89"
BOTH = f"-gencode arch=compute_89,code=sm_89 {PTX}"


@pytest.fixture
def commands(tmp_path):
    """What is read of what CMake would write for sources (file, library, flags)."""

    def write(*sources):
        entries = []
        for file, library, flags in sources:
            command = (
                f"nvcc {flags} -c /src/{file} -o CMakeFiles/{library}.dir/{file}.o"
            )
            entries.append({"file": f"/src/{file}", "command": command})
        folder = tmp_path / "build" / "temp.linux"
        folder.mkdir(parents=True)
        (folder / "compile_commands.json").write_text(json.dumps(entries))
        return compiled_sources(tmp_path / "build", Path("/src"))

    return write


def test_sources_and_their_archs(commands):
    found = commands(
        ("csrc/a.cu", "_C", EXACT), ("b.cpp", "_C", ""), ("b.cu", "_M", BOTH)
    )
    assert {source.source: source.names for source in found} == {
        "csrc/a.cu": {"sm_121a"},
        "b.cu": {"sm_89", "compute_89"},
    }
    assert [each.library for each in found] == ["_C", "_M"]
    assert [each.load(GB10) for each in found] == [Load.EXACT, Load.JIT]


@pytest.mark.parametrize(
    ("arch", "flags", "other"),
    [("12.1a", EXACT, BOTH), ("8.9-virtual", PTX, BOTH), ("8.9+PTX", BOTH, PTX)],
)
def test_a_group_is_compiled_to_what_was_proved_and_to_nothing_else(
    commands, arch, flags, other
):
    group = Group(
        site=("CMakeLists.txt", 7),
        name="w8a8/a",
        variable="A",
        defines=(),
        archs=(arch,),
    )
    sources = commands(("csrc/w8a8/a.cu", "_C", flags), ("csrc/w8a8/b.cu", "_C", other))
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
    binaries = [inspect_file(LIBRARIES / "gb10.so")]
    (said,) = prove_compiled(commands(*LINKED), binaries, GB10)
    assert said == "gb10.so: 2 of 3 CUDA sources are exact for NVIDIA DGX Spark (GB10)"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("three.cu", "gb10", "-gencode arch=compute_121,code=sm_121"), "lacks 1 of 3"),
        (
            ("new.cu", "gb10", EXACT),
            "lacks 1 of 1 fat binaries with sm_121a, what new.cu",
        ),
        (("lost.cu", "other", EXACT), "other was compiled, and is not in the wheel"),
    ],
)
def test_what_is_missing_is_told(commands, more, said):
    with pytest.raises(ProofError) as failed:
        prove_compiled(
            commands(*LINKED, more), [inspect_file(LIBRARIES / "gb10.so")], GB10
        )
    assert said in failed.value.what


def judged(folder, target, libraries=KERNELS):
    with WheelFile(vllm_wheel(folder, libraries=libraries)) as wheel:
        return judge_libraries(inspect_wheel(wheel), target, wheel.name)


def test_every_release_has_one_of_each_library_that_it_needs():
    for version in load_recipe("vllm").supported:
        names = [
            k.file
            for k in library_table("vllm").library
            if k.covers(version) and k.required
        ]
        cores = {
            re.sub(r"_stable_libtorch|\.abi3\.so|vllm/", "", name) for name in names
        }
        assert cores == {"_C", "_moe_C"}, version


@pytest.mark.parametrize(
    ("target", "use"),
    [
        (GB10, (Use.PARTLY, Use.LOADS, Use.OTHER)),
        (H200, (Use.LOADS, Use.LOADS, Use.LOADS)),
        (THOR, (Use.LOST, Use.LOST, Use.OTHER)),
    ],
)
def test_what_a_library_is(tmp_path, target, use):
    found = {
        Path(each.name).name.partition(".")[0]: each.use
        for each in judged(tmp_path, target)
    }
    assert (found["_C"], found["_moe_C"], found["_vllm_fa3_C"]) == use


def test_only_what_cannot_be_done_without_is_fatal(tmp_path):
    kept = {"vllm/_C.abi3.so": LOST, "vllm/_C_stable_libtorch.abi3.so": HOPPER}
    with pytest.raises(ProofError) as caught:
        require_loading(judged(tmp_path, GB10, kept), GB10, WheelName(NAME))
    lost = [line.split(":")[0].strip() for line in caught.value.what.splitlines()[1:]]
    assert lost == ["vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C.abi3.so"]
    require_loading(judged(tmp_path, GB10), GB10, WheelName(NAME))


def test_the_way_around_lost_kernels_is_among_the_fixes():
    assert set(library_table("vllm").around) <= {
        fix.id for fix in load_recipe("vllm").fixes
    }
