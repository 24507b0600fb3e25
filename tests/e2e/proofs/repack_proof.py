"""Upstream's wheels, repacked twice and compared; those for this CPU installed, used and removed.

    python -m e2e.proofs.repack_proof [X.Y.Z …]

Nothing that vLLM depends on is installed, so nothing is imported: `nox -s cross-proof` does that.
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
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from support.proving import files, require, run
from tools import run_program

RELEASES = ("0.19.1", "0.20.2", "0.25.1", "0.33.0")
CPUS = ("aarch64", "x86_64")


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
    args = parser.parse_args()
    print("release | CPU | s | again | MB | upstream's | fixes | kernels")
    for version, cpu in product(args.releases, CPUS):
        with tempfile.TemporaryDirectory(prefix="repack-") as folder:
            print(*proved(version, cpu, Path(folder)), sep=" | ")
    return 0


def proved(version: str, cpu: str, folder: Path) -> list[str]:
    """Repack twice, compare, and use the wheel if it is for this CPU; a row of the table."""
    answers = []
    for name in ("one", "two"):
        command = [
            sys.executable,
            "-m",
            "patchkit",
            "repack",
            f"vllm=={version}",
            "--cpu",
            cpu,
        ]
        told = json.loads(run(*command, "--dir", str(folder / name), "--json"))
        print(
            f"{told['wheel'].rpartition('/')[2]}: {told['seconds']} s",
            *told["notes"],
            sep="\n  ",
        )
        answers.append(told)
    first, again = answers
    wheels = [Path(told["wheel"]) for told in answers]
    require(wheels[0].name == wheels[1].name, "the two wheels have different names")
    require(
        wheels[0].read_bytes() == wheels[1].read_bytes(), f"{wheels[0].name} differs"
    )
    wheels[1].unlink()
    run(sys.executable, "-m", "patchkit", "verify", str(folder / "one"))
    if cpu == platform.machine():
        used(first, folder / "venv")
    counts = Counter(library["use"] for library in first["libraries"])
    applied = [fix["id"] for fix in first["fixes"] if fix["state"] == "applied"]
    return [
        *(version, cpu, f"{first['seconds']:.0f}", f"{again['seconds']:.0f}"),
        *(
            f"{first['size'] / 1e6:.1f}",
            f"{first['source']['size'] / 1e6:.1f}",
            " ".join(applied),
        ),
        ", ".join(f"{count} {use}" for use, count in counts.items()),
    ]


def used(told: Mapping[str, Any], home: Path) -> None:
    """Use a wheel: install it alone, check, revert and remove."""
    venv.create(home, with_pip=True)
    python = str(home / "bin" / "python")
    pip = (python, "-m", "pip")
    run(*pip, "install", "--quiet", "--no-cache-dir", "--no-deps", told["wheel"])
    done = subprocess.run((*pip, "check"), capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "No broken" not in line]
    wrong = [line for line in lines if "which is not installed" not in line]
    require(not wrong, "pip check: " + "; ".join(wrong[:3]))
    packages = next(home.glob("lib/python*/site-packages"))
    source = ("--vllm-src", str(packages / "vllm"))
    patchkit = (sys.executable, "-m", "patchkit")
    states = json.loads(run(*patchkit, "fixes", *source, "--json"))["fixes"]
    applied = {fix["id"] for fix in states if fix["state"] == "applied"}
    meant = {fix["id"] for fix in told["fixes"] if fix["state"] == "applied"}
    require(applied == meant, f"status says {applied}, not {meant}")
    run(*patchkit, "revert", *source)
    run(*pip, "uninstall", "--quiet", "--yes", "vllm")
    left = sorted(
        path for path in files(packages) if path.startswith(("vllm/", "vllm-"))
    )
    left += [path for path in ("bin/vllm",) if (home / path).exists()]
    require(not left, f"uninstalling left {left[:3]}")
    print("  installed, reverted, removed without a rest")


if __name__ == "__main__":
    run_program(main)
