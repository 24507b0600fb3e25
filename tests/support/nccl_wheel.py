"""What a user does with a libnccl wheel: install it, load it, remove it."""

from __future__ import annotations

import json
import tempfile
import venv
import zipfile
from pathlib import Path

from packaging.utils import parse_wheel_filename

from support.proving import files, require, run

LIBRARY = "nvidia/nccl/lib/libnccl.so.2"
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


def accept(wheel: Path) -> None:
    """Raise ProofError unless a wheel for this CPU installs, loads and goes as it should."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "venv"
        venv.create(home, with_pip=True)
        python = str(home / "bin" / "python")
        before = files(home)
        run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel))
        run(python, "-m", "pip", "check")
        library = next(home.glob("lib/python*/site-packages")) / LIBRARY
        found = json.loads(run(python, "-c", ASK, str(library)))
        require(found["mapped"] == [str(library)], f"mapped: {found['mapped']}")
        major, minor, patch = parse_wheel_filename(wheel.name)[1].release
        expected = major * 10000 + minor * 100 + patch
        require(found["codes"] == [0, 0], f"NCCL answers with {found['codes']}")
        require(found["version"] == expected, f"ncclGetVersion says {found['version']}")
        require(library.read_bytes() == content(wheel), "the library is not the wheel's")
        run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "nvidia-nccl-cu13")
        left = sorted(files(home) - before)
        require(not left, f"uninstalling left {left[:3]}")


def content(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as bundle:
        return bundle.read(LIBRARY)
