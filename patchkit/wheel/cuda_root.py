"""One CUDA toolkit for torch's CMake: the compiler of the toolchain, the libraries torch runs with.

torch's wheels bring headers and libraries of the CUDA that they were built with, but neither nvcc
nor a file that stands for the driver.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from patchkit.errors import HostError
from patchkit.wheel.toolchain import Toolchain

_DRIVER = "libcuda.so"
_FUNCTION = re.compile(r"\bCUresult\s+(?:CUDAAPI\s+)?(cu[A-Z]\w*)\s*\(")


def assemble(home: Path, toolchain: Toolchain, packages: Path) -> Path:
    """Links below ``home`` to all that CMake looks for; ``packages`` is torch's site-packages.

    Its path does not depend on where the parts are, since compilers write paths of headers into
    what they compile. Raises HostError if the driver's stand-in cannot be made.
    """
    toolkit = toolchain.nvcc.parents[1]
    brought = packages / "nvidia" / f"cu{toolchain.cuda.partition('.')[0]}"
    home.mkdir(parents=True)
    for name in ("bin", "nvvm"):
        (home / name).symlink_to(toolkit / name)
    _link(home / "include", [toolchain.include, brought / "include"])
    _link(home / "lib64", [toolchain.lib, brought / "lib"])
    for library in sorted((home / "lib64").glob("lib*.so.*")):
        plain = library.with_name(library.name.partition(".so.")[0] + ".so")
        if not plain.exists():
            plain.symlink_to(library.name)
    if not (home / "lib64" / "stubs" / _DRIVER).exists():
        _stand_in(home, toolchain)
    return home


def _link(folder: Path, sources: Iterable[Path]) -> None:
    """Links to what is in the sources; the first one that has a name gives it."""
    folder.mkdir()
    for source in sources:
        for entry in sorted(source.iterdir()) if source.is_dir() else ():
            if not (folder / entry.name).is_symlink():
                (folder / entry.name).symlink_to(entry)


def _stand_in(home: Path, toolchain: Toolchain) -> None:
    """A libcuda.so to link with, as toolkits have one: every function of cuda.h, doing nothing."""
    stubs = home / "lib64" / "stubs"
    stubs.mkdir()
    header = [str(toolchain.cxx), "-E", "-P", "-xc++", f"-I{home / 'include'}", "-"]
    said = _run(header, "#include <cuda.h>\n")
    names = sorted(set(_FUNCTION.findall(said)))
    library = [str(toolchain.cxx), "-xc", "-", "-shared", "-fPIC", "-nostdlib"]
    library += [f"-Wl,-soname,{_DRIVER}.1", "-o", str(stubs / _DRIVER)]
    _run(library, "".join(f"void {name}(void) {{}}\n" for name in names))


def _run(command: list[str], text: str) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode != 0:
        raise HostError(
            f"{command[0]} cannot make a stand-in for the driver's library\n    "
            + done.stderr.strip()[-400:],
            why="cuda.h is missing, or this is no C++ compiler",
            hint="--cuda locked takes the toolkit that patchkit knows",
        )
    return done.stdout
