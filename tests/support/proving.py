"""What the long proofs of wheels have in common: how a user installs, loads and removes one."""

from __future__ import annotations

import json
import subprocess
import tempfile
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

from packaging.utils import parse_wheel_filename

from patchkit.errors import ProofError

_SHOWN = 1500  # characters of what a command said
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


def files(folder: Path) -> set[str]:
    """Every file below a folder; of caches not, which Python writes as it likes."""
    names = (
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    )
    return {name for name in names if "__pycache__" not in name}


def require(held: bool, what: str) -> None:
    if not held:
        raise ProofError(what)


def run(*command: str, env: Mapping[str, str] | None = None) -> str:
    """What a command says. Raises ProofError, with its last words, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-_SHOWN:]
        raise ProofError(
            f"{' '.join(command[:5])} … ended with {done.returncode}:\n{said}"
        )
    return done.stdout


def accept_nccl(wheel: Path) -> None:
    """Raise ProofError unless a libnccl wheel for this CPU installs, loads and goes."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "venv"
        venv.create(home, with_pip=True)
        python = str(home / "bin" / "python")
        before = files(home)
        run(
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            str(wheel),
        )
        run(python, "-m", "pip", "check")
        library = next(home.glob("lib/python*/site-packages")) / LIBRARY
        found = json.loads(run(python, "-c", ASK, str(library)))
        require(found["mapped"] == [str(library)], f"mapped: {found['mapped']}")
        major, minor, patch = parse_wheel_filename(wheel.name)[1].release
        expected = major * 10000 + minor * 100 + patch
        require(found["codes"] == [0, 0], f"NCCL answers with {found['codes']}")
        require(found["version"] == expected, f"ncclGetVersion says {found['version']}")
        require(
            library.read_bytes() == libnccl_of(wheel), "the library is not the wheel's"
        )
        run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "nvidia-nccl-cu13")
        left = sorted(files(home) - before)
        require(not left, f"uninstalling left {left[:3]}")


def libnccl_of(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as bundle:
        return bundle.read(LIBRARY)
