"""What a user does with a libnccl wheel: install it over another one, load it, remove it.

    python tests/support/nccl_wheel.py WHEEL [--over STOCK.whl]

A wheel for this CPU is loaded in a fresh virtual environment; one for aarch64 under qemu-user, if
qemu-aarch64-static and the cross compiler are here. Exit code 0: everything held.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from packaging.utils import parse_wheel_filename

from patchkit.cli.out import say
from patchkit.errors import HostError, PatchkitError
from support.proving import files, require, run

LIBRARY = "nvidia/nccl/lib/libnccl.so.2"
CROSS, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
SYSROOT = "/usr/aarch64-linux-gnu"
# ncclGetUniqueId opens a socket and looks at the network, but needs no GPU.
ASK = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
version, identifier = ctypes.c_int(), ctypes.create_string_buffer(128)
codes = library.ncclGetVersion(ctypes.byref(version)), library.ncclGetUniqueId(identifier)
lines = open("/proc/self/maps").read().splitlines()
mapped = sorted({line.split(maxsplit=5)[5] for line in lines if "libnccl" in line})
print(json.dumps({"codes": codes, "version": version.value, "mapped": mapped}))
"""
ASK_C = r"""
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **names) {
  int version = 0; char identifier[128];
  void *library = dlopen(names[1], RTLD_NOW);
  if (!library) { fprintf(stderr, "%s\n", dlerror()); return 1; }
  int (*ask)(int *) = (int (*)(int *))dlsym(library, "ncclGetVersion");
  int (*make)(void *) = (int (*)(void *))dlsym(library, "ncclGetUniqueId");
  int first = ask(&version), second = make(identifier);
  printf("{\"codes\": [%d, %d], \"version\": %d, \"mapped\": []}\n", first, second, version);
  return 0;
}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--over", type=Path, help="installed first")
    args = parser.parse_args()
    try:
        accept(args.wheel.resolve(), args.over)
    except PatchkitError as error:
        say(f"error: {error}")
        return error.exit_code
    return 0


def accept(wheel: Path, over: Path | None = None) -> None:
    """Raise ProofError unless the wheel installs, loads and goes as it should."""
    if platform.machine() in wheel.stem.rpartition("-")[2]:
        installed(wheel, over)
    else:
        emulated(wheel)


def installed(wheel: Path, over: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "venv"
        venv.create(home, with_pip=True)
        python = str(home / "bin" / "python")
        before = files(home)
        if over:
            run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(over))
        run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel))
        run(python, "-m", "pip", "check")
        packages = next(home.glob("lib/python*/site-packages"))
        library = packages / LIBRARY
        found = json.loads(run(python, "-c", ASK, str(library)))
        require(found["mapped"] == [str(library)], f"mapped: {found['mapped']}")
        check(found, wheel)
        require(library.read_bytes() == content(wheel), "the library is not the wheel's")
        run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "nvidia-nccl-cu13")
        left = sorted(files(home) - before)
        require(not left, f"uninstalling left {left[:3]}")
    say(f"{wheel.name}: installed, checked, loaded, the only libnccl, removed")


def emulated(wheel: Path) -> None:
    if absent := [tool for tool in (CROSS, QEMU) if shutil.which(tool) is None]:
        raise HostError(
            f"{absent[0]} is not on this machine: a wheel for aarch64 cannot be loaded",
            hint="apt install gcc-aarch64-linux-gnu qemu-user-static",
        )
    with tempfile.TemporaryDirectory() as folder:
        source, program, library = (Path(folder) / n for n in ("ask.c", "ask", "libnccl.so.2"))
        source.write_text(ASK_C)
        library.write_bytes(content(wheel))
        run(CROSS, str(source), "-o", str(program), "-ldl")
        found = json.loads(run(QEMU, "-L", SYSROOT, str(program), str(library)))
        check(found, wheel)
    say(f"{wheel.name}: loaded under qemu-user, NCCL {found['version']}")


def check(found: dict, wheel: Path) -> None:
    version = parse_wheel_filename(wheel.name)[1]
    major, minor, patch = version.release
    wanted = major * 10000 + minor * 100 + patch
    require(found["codes"] == [0, 0], f"NCCL answers with {found['codes']}")
    require(found["version"] == wanted, f"ncclGetVersion says {found['version']}, not {wanted}")


def content(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as bundle:
        return bundle.read(LIBRARY)


if __name__ == "__main__":
    sys.exit(main())
