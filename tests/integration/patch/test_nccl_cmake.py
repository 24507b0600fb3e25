"""NCCL configured by CMake for real, with nvcc: what is in the build files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from patchkit.apply import apply
from patchkit.edit.splice import splice
from patchkit.patching.recipe import load_recipe
from patchkit.proof.cmake import cmake_program
from patchkit.recipes.nccl.build_files import PC_FILE, SOURCE_FILE
from patchkit.source.detect import detect

RECIPE = load_recipe("nccl")
LIBRARY = "lib/libnccl.so.2.29.7"
NVCC = shutil.which("nvcc")
NINJA = shutil.which("ninja")

pytestmark = pytest.mark.skipif(
    not (NVCC and NINJA), reason="needs nvcc 13 and ninja: CMake asks the compiler"
)


def run(*command, cwd, rc=0):
    environment = {key: value for key, value in os.environ.items() if key != "CUDAARCHS"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == rc, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.e2e
def test_a_plain_cmake_is_for_the_device_alone(nccl, ask, tmp_path, rewrite):
    """One build folder, so that the compilers are asked once."""
    root, build = nccl(), tmp_path / "build"
    apply(root, RECIPE, ask())
    build.mkdir()

    said = run(cmake_program(), "-G", "Ninja", root, cwd=build)

    assert "-- Using CUDA_ARCHITECTURES: 121-real\n" in said
    rules = (build / "build.ninja").read_text()
    assert set(re.findall(r"generate-code=([\w=,\[\]]+)", rules)) == {
        "arch=compute_121,code=[sm_121]"
    }
    assert {"prefix=/usr/local", "Version: 2.29.7"} < set((build / PC_FILE).read_text().split("\n"))
    link = run(NINJA, "-t", "commands", LIBRARY, cwd=build).splitlines()[-1]
    assert "libcudart_static.a" in link
    assert "libcudart.so" not in link
    assert "/nccl.dir/enhcompat.cc.o: " in rules

    said = run(cmake_program(), "-DCMAKE_CUDA_ARCHITECTURES=90-real", root, cwd=build)
    assert "-- Using CUDA_ARCHITECTURES: 90-real\n" in said

    # What stops Ninja in 2.28.7 to 2.28.9, put back.
    path, header = root / SOURCE_FILE, "${CMAKE_BINARY_DIR}/include/nccl.h"
    text = path.read_text()
    needed = "    DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/nccl.h.in\n"
    rewrite(path, text.replace(needed, f"    BYPRODUCTS {header}\n"))
    stopped = run(cmake_program(), root, cwd=build, rc=1)
    # ninja has said it in two ways; CMake runs it at the end.
    assert re.search(
        r"include/nccl\.h is defined as an output multiple|rules generate include/nccl\.h", stopped
    )
    found = RECIPE.fix("cmake_ninja_header").look(detect(root, "nccl"), ask())
    rewrite(path, splice(path.read_text(), found.edits))
    run(cmake_program(), root, cwd=build)
    assert f"{LIBRARY}: " in run(NINJA, "-t", "targets", "all", cwd=build)
