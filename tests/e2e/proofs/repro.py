"""Two builds of a wheel that must be the same bytes, made as differently as two people would.

    nox -s repro -- nccl|vllm [--whole] [--keep FOLDER] [options of `patchkit build`]

On a difference the first object and the first member of the wheel are named; exit code 5. Without
--whole NCCL's device code is reduced to two kernel families, and of vLLM the smallest extensions
are built, with one CUDA object beside them. The wheel is then installed, loaded and removed.
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
from typing import Any

from e2e.proofs.build_proof import (
    SOURCES,
    check_wheel,
    compiled_object,
    reduced_options,
)
from patchkit.errors import ProofError, UsageError
from support.comparing import first_member, first_object, object_digests
from support.proving import accept_nccl
from tools import run_program

HERE = platform.machine()
# One of them of those that nvcc names after its process number if nobody prevents it.
FAMILIES = "AllReduce Sum f32 RING SIMPLE|Reduce Prod f8e4m3 RING SIMPLE"
BUILDS: dict[str, dict[str, Any]] = {
    "one": {"umask": 0o022, "options": (), "env": {"LC_ALL": "C.UTF-8", "TZ": "UTC"}},
    "two": {
        # Whatever two machines can differ in; flags of compilers must not come through.
        "umask": 0o077,
        "options": ("--jobs", "3"),
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
            "CMAKE_BUILD_TYPE": "Debug",
            "TORCH_CUDA_ARCH_LIST": "8.0",
        },
    },
}

# What is built, with which options if it is not --whole, and where it leaves objects.
PROJECTS: dict[str, dict[str, Any]] = {
    "nccl": {
        "release": "2.29.7",  # the one that a distribution carries
        "options": ("--cpu", HERE),
        "reduced": lambda: ("--functions", FAMILIES),
        "objects": "build",
    },
    "vllm": {
        "release": "0.25.1",
        "options": (),
        "reduced": lambda: reduced_options("0.25.1"),
        "objects": "source/build",
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("project", choices=list(PROJECTS))
    parser.add_argument(
        "--whole", action="store_true", help="all device code, which takes long"
    )
    parser.add_argument("--keep", type=Path, help="leave all wheels there")
    args, options = parser.parse_known_args()
    if not args.whole:
        options = [*PROJECTS[args.project]["reduced"](), *options]
    with tempfile.TemporaryDirectory(prefix="patchkit-repro-") as folder:
        compare(args.project, (args.keep or Path(folder)).absolute(), options)
    return 0


def compare(project: str, folder: Path, options: list[str]) -> None:
    """Build twice, compare, and use the result as a user would."""
    told = [build(project, folder / name, name, options) for name in BUILDS]
    wheels = [Path(each["wheel"]) for each in told]
    objects = [each["objects"] for each in told]
    if not objects[0]:
        raise ProofError("the builds left no objects to compare")
    print(f"{len(objects[0])} objects, {wheels[0].stat().st_size:,} bytes of wheel")
    different = first_object(*objects)
    if (member := first_member(*wheels)) or different:
        raise ProofError(
            f"the builds differ, first in {member or 'no member of the wheel'}",
            why=f"the first object that differs is {different}" if different else "",
            hint="look at both with --keep FOLDER",
        )
    print("the two wheels are the same bytes")
    if project == "nccl":
        accept_nccl(wheels[0])
    else:
        check_wheel(told[0])


def build(project: str, folder: Path, name: str, options: list[str]) -> dict[str, Any]:
    """Build in a folder of its own; return its answer, and its objects' digests."""
    folder.mkdir(parents=True, exist_ok=True)
    how, what = BUILDS[name], PROJECTS[project]
    command = [
        sys.executable,
        "-m",
        "patchkit",
        "build",
        project,
        *what["options"],
        "--json",
    ]
    command += ["--dir", str(folder / "house"), "--fresh", *how["options"], *options]
    command += (
        [] if {"--src", "--version"} & {*options} else ["--version", what["release"]]
    )
    began = time.monotonic()
    env = {k: v for k, v in os.environ.items() if not k.startswith("LC_")} | how["env"]
    env |= {"CCACHE_DISABLE": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        umask=how["umask"],
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        what = f"build {project}, {name}: ended with {done.returncode}"
        raise UsageError(what, why=done.stdout)
    told: dict[str, Any] = json.loads(done.stdout)
    print(f"build {project}, {name}: {time.monotonic() - began:.0f} s")
    work = Path(told["log"]).parent
    if project == "vllm":  # beside the smallest extensions, which are C++ alone
        compiled_object(work, SOURCES[0])
    # The next build empties the folder.
    return told | {"objects": object_digests(work / what["objects"])}


if __name__ == "__main__":
    run_program(main)
