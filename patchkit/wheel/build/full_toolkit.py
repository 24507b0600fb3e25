"""Join a whole CUDA toolkit from two halves: the locked compiler, and the libraries beside torch.

NCCL's build takes a compiler, the runtime and CCCL; torch's CMake also asks for cuBLAS, cuSPARSE,
cuFFT, NVRTC and others. Those are in the build environment already, by locked hash, since torch
needs them, but as a program finds them when it runs: without the unversioned names that a linker
looks for, and without the driver's own library. What is missing is made here.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from patchkit.durable.failure import translated
from patchkit.errors import HostError
from patchkit.process import run
from patchkit.wheel.build.toolchain import Toolchain

# What torch's CMake asks for.
LIBRARIES = ("cublas", "cublasLt", "cudart", "cufft", "curand", "cusolver", "cusparse", "nvrtc")
HEADERS = ("cublas_v2.h", "cuda_runtime.h", "curand_kernel.h", "cusolverDn.h", "cusparse.h")

_VERSIONED = re.compile(r"(?P<name>lib[^/]+?\.so)\.\d+")
_STUB_LIBRARY = 34  # CUDA_ERROR_STUB_LIBRARY of cuda.h
# In cuda.h: a declaration, or what a #define leads to: cuMemAlloc_v2, cuLaunchKernel_ptsz.
_DRIVER_CALL = re.compile(
    r"\bcu[A-Z][A-Za-z0-9]*(?:_v\d+)?(?:_ptsz|_ptds)?\b(?=\s*\(|\s*$)", re.MULTILINE
)


def full_toolkit(toolchain: Toolchain, site: Path, dest: Path) -> Toolchain:
    """Return the toolchain with a toolkit that torch's CMake takes; ``dest`` is written anew.

    ``site`` is the site-packages folder with torch. A file of the toolkit has precedence over one
    beside torch. Raises HostError if something is missing in both, StorageError for I/O.
    """
    beside = site / "nvidia" / "cu13"
    if not beside.is_dir():
        raise HostError(
            f"{site}: no NVIDIA libraries beside torch",
            why="this torch was built for CPUs alone, or for another CUDA",
            hint="use the requirements of the recipe",
        )
    halves = [{"include": toolchain.include, "lib": toolchain.lib}]
    halves.append({part: beside / part for part in ("include", "lib")})
    dest.parent.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.TemporaryDirectory(dir=dest.parent, ignore_cleanup_errors=True)
    with translated("the CUDA toolkit is not complete", dest.parent), scratch as folder:
        home = Path(folder) / "cuda"
        _link_halves(home, toolchain.nvcc.parents[1], halves)
        # Machines that build need no driver, and NVIDIA's wheels have none to link with.
        driver = home / "lib" / "stubs" / "libcuda.so"
        if not driver.exists():
            driver_stand_in(home / "include" / "cuda.h", toolchain.cxx, driver)
        # Only now: what was whole before stays until the new one is.
        shutil.rmtree(dest, ignore_errors=True)
        home.rename(dest)
    include, lib = dest / "include", dest / "lib"
    absent = [f"include/{name}" for name in HEADERS if not (include / name).is_file()]
    absent += [f"lib/lib{name}.so" for name in LIBRARIES if not (lib / f"lib{name}.so").exists()]
    if absent:
        raise HostError(
            f"{dest}: not a whole CUDA toolkit: {', '.join(absent)} missing",
            why="the requirements do not have all of NVIDIA's libraries",
            hint="use the requirements of the recipe",
        )
    return replace(toolchain, nvcc=dest / "bin" / "nvcc", include=include, lib=lib)


def _link_halves(home: Path, compiler: Path, halves: Iterable[Mapping[str, Path]]) -> None:
    """Link to the files of the halves; where both have one, to that of the first."""
    # nvcc looks for the rest of the toolkit beside itself, links followed.
    shutil.copytree(compiler / "bin", home / "bin", symlinks=True)
    (home / "nvvm").symlink_to(compiler / "nvvm")
    for part in ("include", "lib"):
        (home / part).mkdir()
        for half in halves:
            for entry in sorted(half[part].iterdir()):
                # A linker looks for libfoo.so, a program for libfoo.so.13.
                match = _VERSIONED.fullmatch(entry.name)
                for name in (entry.name, *([match["name"]] if match else [])):
                    if not (home / part / name).is_symlink():
                        (home / part / name).symlink_to(entry)
    # Installed toolkits have lib64, NVIDIA's wheels have lib; builds look in either.
    (home / "lib64").symlink_to("lib")


def driver_stand_in(header: Path, cxx: Path, library: Path) -> None:
    """Make a stand-in for the driver's library: its name, and those of its calls in ``cuda.h``.

    Each call answers as those of NVIDIA's own stub library do. Raises HostError if ``cxx`` cannot.
    """
    text = header.read_text(encoding="utf-8", errors="replace")
    names = sorted({match.group() for match in _DRIVER_CALL.finditer(text)})
    library.parent.mkdir(parents=True, exist_ok=True)
    source = library.with_suffix(".c")
    calls = (f"int {name}(void) {{ return {_STUB_LIBRARY}; }}\n" for name in names)
    source.write_text("".join(calls), encoding="utf-8")
    command = [
        str(cxx), "-x", "c", "-w", "-fno-builtin", "-shared", "-fPIC", "-nostdlib",
        "-Wl,-soname,libcuda.so.1", str(source), "-o", str(library),
    ]  # fmt: skip
    run(*command, why="it cannot link a shared library", hint="apt install g++", timeout=None)
    source.unlink()
