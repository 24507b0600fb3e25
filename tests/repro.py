"""Two builds of a wheel that must be the same bytes, made as differently as two people would.

    nox -s repro -- nccl [--whole] [--keep FOLDER] [options of `patchkit build nccl`]

Another folder, umask, locale, time zone, number of jobs, hash seed, and flags in the environment;
no compiler cache. Without --whole NCCL's device code is reduced to two kernel families, one of
them of those that nvcc names after its process number if nobody prevents it. The wheel is then
inspected, installed, loaded and removed (tests/nccl_wheel.py). On a difference the first object and
the first member of the wheel are named; exit code 5.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from nccl_wheel import accept
from patchkit.errors import PatchkitError, ProofError, UsageError
from patchkit.wheel.repro import first_member, first_object

CONSOLE = Console(highlight=False, soft_wrap=True)
REDUCED = "AllReduce Sum f32 RING SIMPLE|Reduce Prod f8e4m3 RING SIMPLE"
RELEASE = "2.29.7"  # the one that a distribution carries
BUILDS = {
    "one": {"umask": 0o022, "jobs": None, "env": {"LC_ALL": "C.UTF-8", "TZ": "UTC"}},
    "two": {
        "umask": 0o077,
        "jobs": 3,
        "env": {
            "LC_ALL": "tr_TR.UTF-8",
            "LANGUAGE": "tr",
            "TZ": "Asia/Kathmandu",
            "PYTHONHASHSEED": "7",
            "SOURCE_DATE_EPOCH": "1700000000",
            "CXXFLAGS": "-O1 -fno-inline",
            "NVCC_APPEND_FLAGS": "-lineinfo",
            "CPATH": "/nonexistent",
            "MAKEFLAGS": "-k",
        },
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("project", choices=["nccl"])
    parser.add_argument("--whole", action="store_true", help="all device code: half an hour each")
    parser.add_argument("--keep", type=Path, help="leave both wheels there")
    args, options = parser.parse_known_args()
    try:
        with tempfile.TemporaryDirectory(prefix="patchkit-repro-") as folder:
            compare(args.keep or Path(folder), options, whole=args.whole)
    except PatchkitError as error:
        CONSOLE.print(f"repro: {error}", markup=False)
        return error.exit_code
    return 0


def compare(folder: Path, options: list[str], *, whole: bool) -> None:
    """Build twice, compare, and use the result as a user would."""
    if not {"--version", "--src"} & set(options):
        options = [*options, "--version", RELEASE]
    if "--host" not in options:
        options = [*options, "--host", platform.machine()]
    if not whole:
        options = [*options, "--functions", REDUCED]
    wheels = [build(folder / name, name, options) for name in BUILDS]
    objects = [json.loads((folder / name / "objects.json").read_text()) for name in BUILDS]
    if not objects[0]:
        raise ProofError("the builds left no objects to compare")
    CONSOLE.print(f"{len(objects[0])} objects, {wheels[0].stat().st_size:,} bytes of wheel")
    different = first_object(*objects)
    if (member := first_member(*wheels)) or different:
        raise ProofError(
            f"the builds differ, first in {member or 'no member of the wheel'}",
            why=f"the first object that differs is {different}" if different else "",
            hint="look at both with --keep FOLDER",
        )
    CONSOLE.print("the two wheels are the same bytes", style="green")
    accept(wheels[0])


def build(folder: Path, name: str, options: list[str]) -> Path:
    """One build from a folder of its own; the wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    how = BUILDS[name]
    command = [sys.executable, "-m", "patchkit", "build", "nccl", "--fresh", *options]
    command += ["--dir", str(folder / "house"), "--objects", str(folder / "objects.json")]
    if how["jobs"]:
        command += ["--jobs", str(how["jobs"])]
    began = time.monotonic()
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("LC_")}
    env = {**inherited, "CCACHE_DISABLE": "1", **how["env"]}
    done = subprocess.run(command, cwd=folder, env=env, umask=how["umask"])
    if done.returncode != 0:
        raise UsageError(f"build {name} ended with {done.returncode}")
    CONSOLE.print(f"build {name}: {time.monotonic() - began:.0f} s")
    (wheel,) = (folder / "house").glob("*.whl")
    return wheel


if __name__ == "__main__":
    sys.exit(main())
