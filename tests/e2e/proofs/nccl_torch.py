"""A libnccl wheel beside the torch that pins its version, resolved and installed by pip.

    python -m e2e.proofs.nccl_torch WHEEL --torch 2.12.1 [--install]

Resolves torch and the wheel as pip would on the wheel's CPU (a dry run, from metadata alone). With
--install, on that very CPU: installs both into a fresh virtual environment (gigabytes), asks
`pip check`, imports torch and compares what it maps with what `patchkit inspect --loaded` says,
and removes the wheel again. Exit code 0: everything held.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import venv
from pathlib import Path

from packaging.utils import parse_wheel_filename

from patchkit.errors import PatchkitError
from support.nccl_wheel import content
from support.proving import files, require, run

PROJECT = "nvidia-nccl-cu13"
PYTHON = "3.12"
# manylinux_2_X of wheels: pip tries only platforms that are named if any is.
GLIBCS = (*range(17, 40), 5)
IMPORT = """
import json, torch
lines = open("/proc/self/maps").read().splitlines()
mapped = sorted({line.split(maxsplit=5)[5] for line in lines if "libnccl" in line})
print(json.dumps({"torch": torch.__version__, "mapped": mapped}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", required=True, metavar="X.Y.Z")
    parser.add_argument("--install", action="store_true")
    args = parser.parse_args()
    wheel = args.wheel.resolve()
    try:
        resolved(wheel, args.torch)
        if args.install:
            installed(wheel, args.torch)
    except PatchkitError as error:
        print(f"error: {error}")
        return error.exit_code
    return 0


def resolved(wheel: Path, torch: str) -> None:
    """Check that pip, given the wheel by name, takes it and nothing else of that project."""
    cpu = "aarch64" if wheel.stem.endswith("aarch64") else "x86_64"
    report = run(
        *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"),
        *("--report=-", "--only-binary=:all:", f"--python-version={PYTHON}", *platforms(cpu)),
        # Some pips want --target beside --platform; a dry run does not write there.
        *("--target=/nonexistent", str(wheel), f"torch=={torch}"),
    )
    chosen = {
        each["metadata"]["name"]: each["metadata"]["version"]
        for each in json.loads(report)["install"]
    }
    wanted = str(parse_wheel_filename(wheel.name)[1])
    require(chosen.get(PROJECT) == wanted, f"pip chose {chosen.get(PROJECT)}, not {wanted}")
    print(f"{cpu}, torch {torch}: {len(chosen)} packages resolved, {PROJECT} {wanted}")


def platforms(cpu: str) -> list[str]:
    """Return options of pip: the platforms of a CPU's wheels."""
    named = [f"manylinux_2_{minor}_{cpu}" for minor in GLIBCS]
    return [f"--platform={name}" for name in (*named, f"manylinux2014_{cpu}", f"linux_{cpu}")]


def installed(wheel: Path, torch: str) -> None:
    require(platform.machine() in wheel.name, f"{wheel.name} is not for {platform.machine()}")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "venv"
        venv.create(home, with_pip=True)
        python = str(home / "bin" / "python")
        # Torch with stock's NCCL first: the wheel has to take its place, not to come before it.
        run(python, "-m", "pip", "install", "--quiet", f"torch=={torch}")
        run(python, "-m", "pip", "install", "--quiet", "--no-index", str(wheel))
        print(run(python, "-m", "pip", "check").strip())
        foretold = json.loads(
            run(
                sys.executable,
                "-m",
                "patchkit",
                "inspect",
                "--loaded",
                "--python",
                python,
                "--json",
            )
        )
        found = json.loads(run(python, "-c", IMPORT))
        require(len(found["mapped"]) == 1, f"mapped: {found['mapped']}")
        library = Path(found["mapped"][0])
        require(library.read_bytes() == content(wheel), f"{library} is not the wheel's")
        told = foretold["torch"]["path"]
        require(Path(told).resolve() == library.resolve(), f"--loaded says {told}")
        print(f"torch {found['torch']} maps {library}, as --loaded says")
        run(python, "-m", "pip", "uninstall", "--quiet", "--yes", PROJECT)
        left = [name for name in files(home) if "nccl" in name and "torch" not in name]
        require(not left, f"uninstalling left {left[:3]}")
        print("removed, and nothing is left of it")


if __name__ == "__main__":
    sys.exit(main())
