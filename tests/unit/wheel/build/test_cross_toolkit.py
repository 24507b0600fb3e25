"""A toolkit for another CPU, as CMake finds things with its toolchain file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from patchkit.elf import read_dynamic
from patchkit.wheel.build.cross_toolkit import cross_toolkit, cross_variables
from support.needed import need

CROSS = "aarch64-linux-gnu-g++"
# As torch's and CMake's own modules look for the driver: first in the toolkit, then anywhere.
PROJECT = """\
cmake_minimum_required(VERSION 3.20)
project(small LANGUAGES NONE)
find_library(DRIVER cuda PATHS "${TOOLKIT}" PATH_SUFFIXES ${WHERE} NO_DEFAULT_PATH)
find_library(DRIVER cuda PATHS "${MACHINE}")
file(WRITE "${CMAKE_BINARY_DIR}/found" "${DRIVER}")
"""


@pytest.mark.parametrize(
    ("where", "found"),
    [("lib/stubs", "{dest}/lib/stubs/libcuda.so"), ("nowhere", "DRIVER-NOTFOUND")],
)
def test_a_driver_of_this_machine_is_not_linked(halves, tmp_path, where, found):
    need(CROSS, "g++", "cmake")
    toolchain, site, dest = halves(machine="aarch64", cxx=CROSS)
    cross_toolkit(toolchain, site, Path(sys.executable), dest, root=dest)
    assert read_dynamic(dest / "lib/stubs/libcuda.so").machine == "aarch64"
    machine = tmp_path / "usr/lib"
    machine.mkdir(parents=True)
    subprocess.run(["g++", "-shared", "-x", "c", "/dev/null", "-o", machine / "libcuda.so"])
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    given = {
        "CMAKE_TOOLCHAIN_FILE": cross_variables(toolchain, dest)["CMAKE_TOOLCHAIN_FILE"],
        "TOOLKIT": dest,
        "MACHINE": machine,
        "WHERE": where,
    }
    options = [f"-D{name}={value}" for name, value in given.items()]
    command = ["cmake", "-S", tmp_path, "-B", tmp_path / "build", *options]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "build/found").read_text() == found.format(dest=dest)
