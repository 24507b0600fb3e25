"""Running a build: what it sees, what is told while it runs, and what it leaves."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from patchkit.errors import BuildError
from patchkit.wheel.build.compiled import (
    clean_environment,
    drop_partial,
    objects_to_make,
    run_build,
)
from patchkit.wheel.build.machine import Toolchain
from support.needed import need

ENV = {"PATH": os.environ["PATH"]}
HERE = Path("/usr")
TOOLS = Toolchain(
    machine="aarch64",
    nvcc=HERE / "bin/nvcc",
    cuda="13.0.88",
    cxx=HERE / "bin/g++",
    compiler="g++",
    include=HERE / "include",
    lib=HERE / "lib",
)


def test_nothing_of_the_callers_decides(monkeypatch, tmp_path):
    # Each would change what compilers, make, CMake or Python do; what is seen is all below.
    foreign = (
        "CXX",
        "CXXFLAGS",
        "CPATH",
        "NVCC_CCBIN",
        "MAKEFLAGS",
        "CMAKE_ARGS",
        "PYTHONPATH",
    )
    for name in (*foreign, "LDFLAGS", "NVCC_APPEND_FLAGS", "TZ", "SOURCE_DATE_EPOCH"):
        monkeypatch.setenv(name, "the caller's")
    for name in ("HOME", "TMPDIR", "CCACHE_DIR"):
        monkeypatch.setenv(name, f"/{name}")
    seen = clean_environment(tmp_path / "root")
    assert seen.pop("PATH").endswith(os.environ["PATH"])
    for optional in ("VIRTUAL_ENV", "CCACHE_CONFIGPATH", "CCACHE_DISABLE"):
        seen.pop(optional, None)
    assert seen == {
        "HOME": "/HOME",
        "TMPDIR": "/TMPDIR",
        "CCACHE_DIR": "/CCACHE_DIR",
        "LC_ALL": "C",
        "TZ": "UTC",
        "SOURCE_DATE_EPOCH": "315532800",
        "PYTHONHASHSEED": "0",
        "NVCC_APPEND_FLAGS": "-frandom-seed=patchkit",
        "GIT_CEILING_DIRECTORIES": str(tmp_path),
        "CCACHE_NAMESPACE": "patchkit-vllm",
    }


def make(folder, rules, *, total=0):
    """Run a Makefile of these rules for ``all``: what progress was told."""
    need("make")
    told = []
    (folder / "Makefile").write_text(rules.replace("    ", "\t"))
    env, command = {**ENV, "LC_ALL": "C"}, ["make", "-j1", "all"]
    run_build(command, folder, env, lambda *now: told.append(now), objects=total)
    return told


FOUR = "all: a b c d\na b c d:\n    @echo 'Compiling  $@.cc'\n    @echo Compilingless\n"


@pytest.mark.parametrize(
    ("total", "told"),
    [
        (4, [(1, 4), (2, 4), (3, 4), (4, 4), (4, 4)]),
        (2, [(1, 2), (2, 2), (2, 2), (2, 2), (2, 2)]),  # never more than all
        (0, [(0, 1), (0, 1), (0, 1), (0, 1), (1, 1)]),  # make could not tell
    ],
)
def test_progress(tmp_path, total, told):
    assert make(tmp_path, FOUR, total=total) == told


def test_a_failing_build_tells_why(tmp_path):
    need("g++")
    (tmp_path / "bad.cc").write_text("int main() { return unknown; }\n")
    rules = (
        "all: bad.o\nbad.o: bad.cc\n    @seq 100\n    @g++ -c $< -o $@\n    @seq 100\n"
    )
    with pytest.raises(BuildError) as failed:
        make(tmp_path, rules)
    said = failed.value
    assert said.exit_code == 10
    first, error, last = said.what.split("\n")
    assert first == "the build ended with 2"
    assert error.startswith("    bad.cc:1:21: error: ")
    assert last.startswith("    make: *** [Makefile:")
    log = f"the whole log is {tmp_path}/log.txt"
    assert (
        said.hint == f"{log}; run again to go on from here, with --fresh to begin anew"
    )


# What a killed build leaves


def test_objects_to_make(tmp_path):
    need("make")
    small = tmp_path / "root"
    shutil.copytree(Path(__file__).parents[3] / "data/nccl_small", small / "source")
    assert objects_to_make(small, ENV, "") == 3
    assert (small / "build/obj/gensrc/rules.mk").read_text() == "KERNELS := sum max\n"
    (small / "build/obj/init.o").write_text("")
    (small / "build/include").mkdir()
    (small / "build/include/nccl.h").write_text("")
    os.utime(small / "build/include/nccl.h", (1, 1))
    os.utime(small / "source/src/nccl.h.in", (0, 0))
    os.utime(small / "source/makefiles/version.mk", (0, 0))
    assert objects_to_make(small, ENV, "") == 2


def test_unfinished_output_goes_and_finished_stays(tmp_path):
    need("gcc")
    code, whole = tmp_path / "code.c", tmp_path / "code.o"
    code.write_text("int answer = 42; int get(void) { return answer; }\n")
    subprocess.run(["gcc", "-g", "-fPIC", "-c", code, "-o", whole], check=True)
    data = whole.read_bytes()
    # Empty, cut short, and as it is before the header is written, the last.
    for number, half in enumerate((b"", data[: len(data) // 2], bytes(64) + data[64:])):
        (tmp_path / f"half{number}.o").write_bytes(half)
        (tmp_path / f"lib{number}.so.2.27.7").write_bytes(half)
    (tmp_path / "libcode.so").symlink_to("nowhere")
    drop_partial(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"code.c", "code.o", "libcode.so"}
    assert whole.read_bytes() == data
