"""A CUDA toolkit in two halves, as the locked packages have them."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from patchkit.wheel.build.toolchain import Toolchain
from patchkit.wheel.build.torch_toolkit import HEADERS, LIBRARIES

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
        files = {"bin/nvcc": "", "nvvm/bin/cicc": "", "lib/libcudart.so.13": "compiler's"}
        files |= {"include/cuda.h": CUDA_H, "include/cuda_runtime.h": "compiler's"}
        site = tmp_path / "env/nvidia/cu13"
        beside = {f"lib/lib{name}.so.13": "torch's" for name in LIBRARIES}
        beside |= {f"include/{name}": "torch's" for name in HEADERS}
        for root, some in ((cuda, files), (site, beside)):
            for path, text in some.items():
                if path not in without:
                    (root / path).parent.mkdir(parents=True, exist_ok=True)
                    (root / path).write_text(text)
        toolchain = Toolchain(
            machine=machine, nvcc=cuda / "bin/nvcc", cuda="13.0.88",
            cxx=Path(shutil.which(cxx) or "/none"), compiler=cxx, include=cuda / "include",
            lib=cuda / "lib",
        )  # fmt: skip
        return toolchain, tmp_path / "env", tmp_path / "work/cuda"

    return make
