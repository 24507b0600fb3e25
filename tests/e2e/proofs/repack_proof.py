"""Upstream's wheels, repacked twice and compared; those for this CPU installed, used and removed.

    python -m e2e.proofs.repack_proof [--full X.Y.Z] [X.Y.Z …]

Without ``--full`` nothing that vLLM depends on is installed, so patched modules are compiled and
not imported; with it, one release is installed whole (some 8 GB), and they are imported. Exit code
0: everything held.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import PatchkitError
from support.proving import files, require, run

RELEASES = ("0.19.1", "0.20.2", "0.25.1", "0.33.0")
CPUS = ("aarch64", "x86_64")
# What is patched, by the names that Python imports it under; argv: site-packages, paths.
COMPILE = """
import importlib.metadata, pathlib, runpy, sys
packages, *paths = sys.argv[1:]
for path in paths:
    compile(pathlib.Path(packages, path).read_bytes(), path, "exec")
own = runpy.run_path(f"{packages}/vllm/_version.py")
print(importlib.metadata.version("vllm"), own["__version__"], len(paths))
"""
IMPORT = """
import importlib, sys
import vllm
print(vllm.__version__)
for name in sys.argv[1:]:
    try:
        print(name, importlib.import_module(name).__file__)
    except ImportError as error:
        print(name, "ImportError:", error)
"""


@dataclass(frozen=True)
class Made:
    """Answer of `patchkit repack --json`."""

    told: dict

    @property
    def wheel(self) -> Path:
        return Path(self.told["wheel"])

    @property
    def patched(self) -> list[str]:
        """Paths of the files that fixes changed."""
        return patched_files(self.wheel)


def patched_files(wheel: Path) -> list[str]:
    """Return the paths of the files that fixes changed, as the wheel's ledger has them."""
    with zipfile.ZipFile(wheel) as bundle:
        (ledger,) = (name for name in bundle.namelist() if name.endswith("ledger.json"))
        return sorted(json.loads(bundle.read(ledger))["files"])


def modules(paths: Iterable[str]) -> list[str]:
    """Return the names that Python imports files under."""
    return [
        p.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for p in paths
        if p.endswith(".py")
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", default=RELEASES)
    parser.add_argument("--full", metavar="X.Y.Z", help="install this one with all it needs")
    args = parser.parse_args()
    try:
        print("release | CPU | s | again | MB | upstream's | fixes | kernels")
        for version in args.releases:
            for cpu in CPUS:
                with tempfile.TemporaryDirectory(prefix="repack-") as folder:
                    print(*proved(version, cpu, Path(folder), full=version == args.full), sep=" | ")
    except PatchkitError as error:
        print(f"error: {error}")
        return error.exit_code
    return 0


def proved(version: str, cpu: str, folder: Path, *, full: bool) -> list[str]:
    """Repack twice, compare, and use the wheel if it is for this CPU; a row of the table."""
    first, again = (made(version, cpu, folder / name) for name in ("one", "two"))
    require(first.wheel.name == again.wheel.name, "the two wheels have different names")
    require(first.wheel.read_bytes() == again.wheel.read_bytes(), f"{first.wheel.name} differs")
    again.wheel.unlink()
    run(sys.executable, "-m", "patchkit", "verify", str(folder / "one"))
    if cpu == platform.machine():
        used(first, folder / "venv", full=full)
    told = first.told
    counts: dict[str, int] = {}
    for library in told["libraries"]:
        counts[library["use"]] = counts.get(library["use"], 0) + 1
    applied = [fix["id"] for fix in told["fixes"] if fix["state"] == "applied"]
    return [
        *(version, cpu, f"{first.told['seconds']:.0f}", f"{again.told['seconds']:.0f}"),
        *(f"{told['size'] / 1e6:.1f}", f"{told['source']['size'] / 1e6:.1f}", " ".join(applied)),
        ", ".join(f"{count} {use}" for use, count in counts.items()),
    ]


def made(version: str, cpu: str, house: Path) -> Made:
    command = [sys.executable, "-m", "patchkit", "repack", f"vllm=={version}", "--cpu", cpu]
    told = json.loads(run(*command, "--dir", str(house), "--json"))
    print(f"{told['wheel'].rpartition('/')[2]}: {told['seconds']} s")
    for note in told["notes"]:
        print(f"  {note}")
    return Made(told)


def used(made: Made, home: Path, *, full: bool) -> None:
    """Use a wheel: install, check, compile or import, revert and remove."""
    venv.create(home, with_pip=True)
    python = str(home / "bin" / "python")
    pip = (python, "-m", "pip")
    quiet = ("install", "--quiet", "--no-cache-dir", *(() if full else ("--no-deps",)))
    run(*pip, *quiet, str(made.wheel))
    check_requirements(python, full=full)
    packages = next(home.glob("lib/python*/site-packages"))
    version = made.told["facts"]["wheel"]
    paths = [path for path in made.patched if path.endswith(".py")]
    said = run(python, "-c", COMPILE, str(packages), *paths).split()
    require(said == [version, version, str(len(paths))], f"it calls itself {said}, not {version}")
    what = f"{len(paths)} patched modules compiled"
    if full:
        what += f", {imported(python, version, paths)} of them imported"
    source = ("--vllm-src", str(packages / "vllm"))
    patchkit = (sys.executable, "-m", "patchkit")
    states = json.loads(run(*patchkit, "status", *source, "--json"))["fixes"]
    applied = {fix["id"] for fix in states if fix["state"] == "applied"}
    told = {fix["id"] for fix in made.told["fixes"] if fix["state"] == "applied"}
    require(applied == told, f"status says {applied}, not {told}")
    run(*patchkit, "revert", *source)
    run(*pip, "uninstall", "--quiet", "--yes", "vllm")
    # What vLLM needs stays, and some of that has folders of this name, too.
    left = sorted(path for path in files(packages) if path.startswith(("vllm/", "vllm-")))
    left += [path for path in ("bin/vllm",) if (home / path).exists()]
    require(not left, f"uninstalling left {left[:3]}")
    print(
        f"  installed{' with all it needs' if full else ' alone'}, {what}, reverted, removed "
        "without a rest",
    )


def imported(python: str, version: str, paths: list[str]) -> int:
    """Count the patched modules that Python imports; what loads kernels needs the driver."""
    names = modules(paths)
    lines = run(python, "-c", IMPORT, *names).splitlines()
    require(version in lines, f"vllm.__version__ is not {version}")
    failed = [line for line in lines if " ImportError: " in line]
    for line in failed:
        print(f"  {line}")
    require(all("libcuda.so.1" in line for line in failed), "a patched module does not import")
    return len(names) - len(failed)


def check_requirements(python: str, *, full: bool) -> None:
    """Run `pip check`; of a wheel installed alone it may only say what is not there."""
    done = subprocess.run((python, "-m", "pip", "check"), capture_output=True, text=True)
    wrong = [line for line in done.stdout.splitlines() if "No broken" not in line]
    if not full:
        wrong = [line for line in wrong if "which is not installed" not in line]
    require(not wrong, "pip check: " + "; ".join(wrong[:3]))


if __name__ == "__main__":
    sys.exit(main())
