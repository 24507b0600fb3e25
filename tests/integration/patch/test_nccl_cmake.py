"""NCCL configured by CMake for real, with nvcc: what is in the build files."""

import os
import re
import shutil
import subprocess

import pytest

from patchkit.apply import apply
from patchkit.patching.recipe import load_recipe
from patchkit.proof.cmake import cmake_program

RECIPE = load_recipe("nccl")
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
def test_a_plain_cmake_is_for_the_device_alone(nccl, ask, tmp_path):
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

    said = run(cmake_program(), "-DCMAKE_CUDA_ARCHITECTURES=90-real", root, cwd=build)
    assert "-- Using CUDA_ARCHITECTURES: 90-real\n" in said
