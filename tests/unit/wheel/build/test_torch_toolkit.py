"""CUDA toolkits that torch's CMake takes, for this CPU and another; the stand-in for torch."""

import ctypes
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from patchkit.elf import read_dynamic
from patchkit.errors import HostError, StorageError
from patchkit.process import ask
from patchkit.wheel.build.machine import Toolchain
from patchkit.wheel.build.torch_toolkit import (
    build_toolkit,
    cross_variables,
    install_torch_stand_in,
    python_headers,
)
from patchkit.wheel.file.torch import installed_torch
from support import write_files
from support.needed import need
from support.small_torch import HEADERS, LIBRARIES, site, small_torch

HERE = platform.machine()
CUDA_H = """\
#define cuMemAlloc cuMemAlloc_v2
CUresult CUDAAPI cuMemAlloc(CUdeviceptr *dptr, size_t bytesize);
CUresult CUDAAPI cuInit(unsigned int Flags);
typedef struct CUctx_st *CUcontext; /* cuThing is a word */
"""


@pytest.fixture
def halves(tmp_path):
    """A locked compiler, and an environment with torch's libraries, ``without`` some of it."""

    def make(without=(), *, machine=HERE, cxx="g++"):
        cuda = tmp_path / "locked"
        files = {
            "bin/nvcc": "",
            "nvvm/bin/cicc": "",
            "lib/libcudart.so.13": "compiler's",
        }
        files |= {"include/cuda.h": CUDA_H, "include/cuda_runtime.h": "compiler's"}
        site = tmp_path / "env/nvidia/cu13"
        beside = {f"lib/lib{name}.so.13": "torch's" for name in LIBRARIES}
        beside |= {f"include/{name}": "torch's" for name in HEADERS}
        for root, some in ((cuda, files), (site, beside)):
            write_files(root, {path: some[path] for path in some.keys() - {*without}})
        toolchain = Toolchain(
            machine=machine, nvcc=cuda / "bin/nvcc", cuda="13.0.88",
            cxx=Path(shutil.which(cxx) or "/none"), compiler=cxx, include=cuda / "include",
            lib=cuda / "lib",
        )  # fmt: skip
        return toolchain, tmp_path / "env", tmp_path / "work/cuda"

    return make


def test_both_halves_are_there_and_the_compilers_half_counts(halves, tmp_path):
    need("g++")
    toolchain, environment, dest = halves()
    build_toolkit(toolchain, environment, Path(sys.executable), dest, root=dest)
    assert (dest / "lib64/libcudart.so").read_text() == "compiler's"
    assert (dest / "lib/libcublas.so").read_text() == "torch's"
    assert (dest / "include/cuda_runtime.h").read_text() == "compiler's"
    assert (dest / "nvvm/bin/cicc").is_file()
    # Code that calls the driver links.
    source = tmp_path / "x.c"
    source.write_text(
        "int cuInit(); int cuMemAlloc_v2(); int f(){return cuInit()+cuMemAlloc_v2();}"
    )
    out, stubs = tmp_path / "x.so", dest / "lib/stubs"
    command = [
        str(toolchain.cxx),
        "-x",
        "c",
        "-shared",
        "-fPIC",
        str(source),
        "-o",
        str(out),
    ]
    command += ["-Wl,-z,defs", f"-L{stubs}", "-lcuda"]
    subprocess.run(command, check=True)
    assert "libcuda.so.1" in read_dynamic(out).needed
    # As NVIDIA's own stub library: nobody takes it for a driver.
    assert ctypes.CDLL(str(stubs / "libcuda.so")).cuInit(0) == 34
    source.write_text("int cuThing(); int f(){return cuThing();}")
    unknown = subprocess.run(command, capture_output=True, text=True)
    assert "undefined reference to `cuThing'" in unknown.stderr


# For another CPU

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
    build_toolkit(toolchain, site, Path(sys.executable), dest, root=dest)
    assert read_dynamic(dest / "lib/stubs/libcuda.so").machine == "aarch64"
    machine = tmp_path / "usr/lib"
    machine.mkdir(parents=True)
    subprocess.run(
        ["g++", "-shared", "-x", "c", "/dev/null", "-o", machine / "libcuda.so"]
    )
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    file = cross_variables(toolchain, dest)["CMAKE_TOOLCHAIN_FILE"]
    options = [f"-DCMAKE_TOOLCHAIN_FILE={file}", f"-DTOOLKIT={dest}"]
    options += [f"-DMACHINE={machine}", f"-DWHERE={where}"]
    command = ["cmake", "-S", tmp_path, "-B", tmp_path / "build", *options]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "build/found").read_text() == found.format(dest=dest)


X86 = """\
#define HAVE_GCC_ASM_FOR_X64 1
#define HAVE_USABLE_WCHAR_T_TOO 1
/* #undef HAVE_USABLE_WCHAR_T */
#define PY_SUPPORT_TIER 1
#define SIZEOF_WCHAR_T 4
"""
AARCH64 = """\
/* #undef HAVE_GCC_ASM_FOR_X64 */
#define HAVE_USABLE_WCHAR_T_TOO 1
#define HAVE_USABLE_WCHAR_T 1
#define PY_SUPPORT_TIER 2
#define SIZEOF_WCHAR_T 4
"""


DISPATCH = """\
# if defined(__x86_64__) && defined(__LP64__)
#  include <x86_64-linux-gnu/python3.11/pyconfig.h>
# elif defined(__aarch64__) && defined(__AARCH64EL__)
#  include <aarch64-linux-gnu/python3.11/pyconfig.h>
# endif
"""
# It says where its header is, and nothing else of this machine's.
PYTHON = f"""\
#!{sys.executable}
import sys, sysconfig
sysconfig.get_config_h_filename = lambda: "{{header}}"
sysconfig.get_config_var = lambda name: "x86_64-linux-gnu"
sys.argv = sys.argv[3:]
exec(sys.argv[0])
"""


def test_it_is_written_under_the_name_that_the_header_includes(tmp_path):
    asked, header = (
        tmp_path / "python",
        tmp_path / "include" / "python3.11" / "pyconfig.h",
    )
    files = {header: DISPATCH, asked: PYTHON.format(header=header)}
    write_files(tmp_path, files, mode=0o755)
    with pytest.raises(HostError, match="has no headers"):
        python_headers(asked, "aarch64", tmp_path / "dest")
    write_files(tmp_path / "include/x86_64-linux-gnu/python3.11", {"pyconfig.h": X86})
    python_headers(asked, "aarch64", tmp_path / "dest")
    made = tmp_path / "dest" / "aarch64-linux-gnu" / "python3.11" / "pyconfig.h"
    assert made.read_text() == AARCH64
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        python_headers(asked, "aarch64", tmp_path / "file")


ASK = """\
import importlib.metadata, sys
import torch
import torch.utils.cpp_extension as extension
from torch.version import hip
answer = {each: eval(each) for each in sys.argv[1:]}
"""


@pytest.fixture
def target(tmp_path):
    return small_torch(tmp_path / "for the other CPU" / "site-packages")


@pytest.fixture
def stand_in(tmp_path, target):
    venv.create(tmp_path / "python", with_pip=False)
    python = tmp_path / "python" / "bin" / "python"
    install_torch_stand_in(site(python), target)
    return python


def test_it_answers_with_what_the_files_of_the_target_say(stand_in, target, tmp_path):
    cuda, torch = tmp_path / "cuda", target / "torch"
    expected = {
        "torch.__version__": "2.15.0+cu130",
        "torch.version.cuda": "13.0",
        "hip": None,
        "torch.__file__": f"{torch}/__init__.py",
        "torch.compiled_with_cxx11_abi()": True,
        "torch.utils.cmake_prefix_path": f"{torch}/share/cmake",
        "extension.COMMON_NVCC_FLAGS": [
            "-D__CUDA_NO_HALF_OPERATORS__",
            "--expt-relaxed-constexpr",
        ],
        "extension.CUDA_HOME": str(cuda),
        "extension.ROCM_HOME": None,
        "extension.include_paths(device_type='cuda')[0::2]": [
            f"{torch}/include",
            f"{cuda}/include",
        ],
        "extension.library_paths('cuda')": [f"{torch}/lib", f"{cuda}/lib64"],
        "importlib.metadata.version('torch')": "2.15.0",
    }
    assert ask(stand_in, ASK, *expected, env={"CUDA_HOME": str(cuda)}) == expected
    (cuda / "lib").mkdir(parents=True)
    question = "extension.library_paths('cuda')[-1]"
    assert ask(stand_in, ASK, question, env={"CUDA_HOME": str(cuda)}) == {
        question: f"{cuda}/lib"
    }
    found = installed_torch(stand_in)
    assert (found.version, found.cuda) == ("2.15.0+cu130", "13.0")
