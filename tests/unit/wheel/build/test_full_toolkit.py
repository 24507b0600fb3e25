"""A toolkit out of a compiler and the libraries beside torch."""

from __future__ import annotations

import ctypes
import subprocess

import pytest

from patchkit.elf import read_dynamic
from patchkit.errors import HostError
from patchkit.wheel.build.full_toolkit import full_toolkit
from support.needed import need


def test_both_halves_are_there_and_the_compilers_half_counts(halves):
    need("g++")
    toolchain, environment, dest = halves()
    made = full_toolkit(toolchain, environment, dest)
    assert (made.nvcc, made.include, made.lib) == (
        dest / "bin/nvcc", dest / "include", dest / "lib",
    )  # fmt: skip
    assert (dest / "lib64/libcudart.so").read_text() == "compiler's"
    assert (dest / "lib/libcublas.so").read_text() == "torch's"
    assert (dest / "include/cuda_runtime.h").read_text() == "compiler's"
    assert (dest / "nvvm/bin/cicc").is_file()
    # Again, over what is there.
    assert full_toolkit(toolchain, environment, dest) == made


def test_code_that_calls_the_driver_links(halves, tmp_path):
    need("g++")
    toolchain, environment, dest = halves()
    full_toolkit(toolchain, environment, dest)
    source = tmp_path / "x.c"
    source.write_text(
        "int cuInit(unsigned); int cuMemAlloc_v2(); int f(){return cuInit(0)+cuMemAlloc_v2();}"
    )
    out = tmp_path / "x.so"
    stubs = dest / "lib/stubs"
    command = [str(toolchain.cxx), "-x", "c", "-shared", "-fPIC", str(source), "-o", str(out)]
    subprocess.run([*command, "-Wl,-z,defs", f"-L{stubs}", "-lcuda"], check=True)
    assert "libcuda.so.1" in read_dynamic(out).needed
    # As NVIDIA's own stub library: nobody takes it for a driver.
    assert ctypes.CDLL(str(stubs / "libcuda.so")).cuInit(0) == 34
    source.write_text("int cuThing(); int f(){return cuThing();}")
    unknown = subprocess.run(
        [*command, "-Wl,-z,defs", f"-L{stubs}", "-lcuda"], capture_output=True, text=True
    )
    assert "undefined reference to `cuThing'" in unknown.stderr


@pytest.mark.parametrize(
    ("without", "says"),
    [
        (["lib/libcusparse.so.13"], "not a whole CUDA toolkit: lib/libcusparse.so missing"),
        (["include/cusolverDn.h"], "include/cusolverDn.h missing"),
    ],
)
def test_what_is_missing_is_named(halves, without, says):
    need("g++")
    with pytest.raises(HostError, match=says):
        full_toolkit(*halves(without))
