"""Lay out a CUDA toolkit for another CPU, with Python's headers and CMake's toolchain file."""

from __future__ import annotations

from pathlib import Path

from patchkit.errors import HostError
from patchkit.quoting import quoted
from patchkit.wheel.across.headers import python_headers
from patchkit.wheel.build.full_toolkit import full_toolkit
from patchkit.wheel.build.toolchain import Toolchain
from patchkit.wheel.build.toolkit import CROSS

# Below the toolkit.
_TOOLCHAIN_FILE, _HEADERS = "target.cmake", "python"
_LINKS = {
    # nvcc goes there by the compiler that it is given; CMake's FindCUDA by CUDA_TOOLKIT_ROOT.
    f"{CROSS}/include": "../../include",
    f"{CROSS}/lib": "../../lib",
    # CMake's name for it, by the processor.
    "targets/aarch64-linux": "sbsa-linux",
}


def cross_toolkit(
    toolchain: Toolchain, site: Path, python: Path, dest: Path, *, root: Path
) -> None:
    """Write a toolkit for ``toolchain.machine`` that torch's CMake takes into ``dest``, anew.

    ``site`` has torch and NVIDIA's libraries for that CPU; ``python`` is the interpreter that
    builds; ``root`` is where the toolkit lies while it is used. Raises HostError, StorageError.
    """
    full_toolkit(toolchain, site, dest)
    (dest / CROSS).mkdir(parents=True)
    for name, leads_to in _LINKS.items():
        (dest / name).symlink_to(leads_to)
    python_headers(python, toolchain.machine, dest / _HEADERS)
    settings = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": toolchain.machine,
        "CMAKE_C_COMPILER": _c_compiler(toolchain.cxx),
        "CMAKE_CXX_COMPILER": toolchain.cxx,
        "CMAKE_CUDA_HOST_COMPILER": toolchain.cxx,
    }
    # Libraries are looked for there alone: a driver of this machine brings a libcuda.so, too.
    roots = (
        root,
        *(site / name for name in ("torch", "nvidia")),
        f"/usr/{toolchain.machine}-linux-gnu",
    )
    settings |= {
        "CMAKE_FIND_ROOT_PATH": ";".join(map(str, roots)),
        "CMAKE_FIND_ROOT_PATH_MODE_LIBRARY": "ONLY",
        "CMAKE_FIND_ROOT_PATH_MODE_PROGRAM": "NEVER",
    }
    lines = [f'set({name} "{value}")\n' for name, value in settings.items()]
    (dest / _TOOLCHAIN_FILE).write_text("".join(lines), encoding="utf-8")


def cross_variables(toolchain: Toolchain, cuda: Path) -> dict[str, str]:
    """Return the variables of a build for another CPU, with the toolkit in ``cuda``."""
    headers = cuda / _HEADERS
    lacked = ("C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH") if headers.is_dir() else ()
    return {
        **dict.fromkeys(lacked, str(headers)),
        "CC": str(_c_compiler(toolchain.cxx)),
        "CMAKE_TOOLCHAIN_FILE": str(cuda / _TOOLCHAIN_FILE),
        # CMake's FindCUDA takes the root of another CPU's toolkit from the environment alone.
        "CUDA_TOOLKIT_ROOT": str(cuda),
        # The platform of the wheel, and of setup.py's folders.
        "_PYTHON_HOST_PLATFORM": f"linux-{toolchain.machine}",
    }


def _c_compiler(cxx: Path) -> Path:
    """Return GCC's C compiler beside its C++ compiler. Raises HostError if there is none."""
    found = cxx.with_name(cxx.name.replace("g++", "gcc"))
    triple, _, version = found.name.partition("-gcc")
    if not found.exists():
        raise HostError(
            f"{found} is not there beside {cxx.name}",
            why="the compilers of C and C++ come in packages of their own",
            hint=quoted("apt", "install", f"gcc{version}-{triple}"),
        )
    return found
