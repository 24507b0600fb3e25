"""Lay out a CUDA toolkit for another CPU, with Python's headers and CMake's toolchain file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import HostError, StorageError
from patchkit.paths import RECIPES
from patchkit.process import ask
from patchkit.quoting import quoted
from patchkit.records import read_toml
from patchkit.wheel.build.full_toolkit import full_toolkit
from patchkit.wheel.build.toolchain import Toolchain
from patchkit.wheel.build.toolkit import CROSS

_ASK = """\
import sysconfig
answer = {
    "header": sysconfig.get_config_h_filename(),
    "own": sysconfig.get_config_var("MULTIARCH") or "",
    "package": "python%s-dev" % sysconfig.get_python_version(),
}
"""
_INCLUDE = r"^[ \t]*#[ \t]*include[ \t]*<({}/python[\w.]+/pyconfig\.h)>"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderMacro:
    """A macro that is another one by CPU; ``recipes/python_headers.toml`` describes the fields."""

    name: str
    value: Mapping[str, str]


def python_headers(python: Path, machine: str, dest: Path) -> Path | None:
    """Write below ``dest`` what an interpreter's headers lack to compile for ``machine``.

    Return ``dest``, for CPLUS_INCLUDE_PATH and C_INCLUDE_PATH, or None if they lack nothing. The
    interpreter's own ``pyconfig.h`` is taken, with the macros of the other CPU. Raises HostError
    if it has no headers, StorageError if they cannot be written.
    """
    said = ask(python, _ASK)
    header = Path(said["header"])
    try:
        text = header.read_text(encoding="utf-8")
        wanted = re.search(_INCLUDE.format(f"{machine}-linux-gnu"), text, re.MULTILINE)
        own = re.search(_INCLUDE.format(re.escape(said["own"])), text, re.MULTILINE)
        if not wanted or not own:
            return None
        text = (header.parents[1] / own[1]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HostError(
            f"{python} has no headers: {error}", hint=quoted("apt", "install", said["package"])
        ) from error
    place = dest / wanted[1]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(header_for(machine, text), encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"cannot write {place}: {error.strerror or error}", hint="free some space"
        ) from error
    return dest


def header_for(machine: str, text: str) -> str:
    """Return a ``pyconfig.h`` as it is on another CPU. What it does not speak of stays away."""
    path = RECIPES / "python_headers.toml"
    for macro in read_toml(tuple[HeaderMacro, ...], path, key="macro"):
        value = macro.value[machine]
        line = f"#define {macro.name} {value}" if value else f"/* #undef {macro.name} */"
        spelled = rf"^(#define {macro.name}\b.*|/\* #undef {macro.name} \*/)$"
        text = re.sub(spelled, line, text, flags=re.MULTILINE)
    return text


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
