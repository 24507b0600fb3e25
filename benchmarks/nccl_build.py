"""Building libnccl beside plain make with the same arch, tools and jobs, in one run.

    nox -s bench -- nccl [--whole] [--cpu aarch64|x86_64] [--stock WHEEL]

`make` is NCCL's own makefiles with the variables that patchkit gives them, in an unpatched tree;
`build` is all of `patchkit build nccl`: fetch, patch, prove, compile, inspect, pack, seal. Neither
has a compiler cache. Without --whole the device code is reduced to one kernel family.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from patchkit.errors import PatchkitError, ProofError
from patchkit.patching.fix import Request
from patchkit.source.archive import unpack
from patchkit.source.resolve import find_origin
from patchkit.target import targets, toolkits
from patchkit.wheel.build.machine import find_toolchain, jobs_for
from patchkit.wheel.build.nccl import JOB_MEMORY, NcclOrder

CONSOLE = Console(highlight=False, soft_wrap=True)
RELEASE = "nccl==2.29.7"
REDUCED = "AllReduce Sum f32 RING SIMPLE"


@dataclass(frozen=True)
class Cost:
    """Seconds of wall clock, and of CPU in all processes."""

    wall: float
    cpu: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--cpu", default=platform.machine())
    parser.add_argument("--stock", type=Path, help="stock's wheel, for its size")
    args = parser.parse_args()
    functions = "" if args.whole else REDUCED
    try:
        with tempfile.TemporaryDirectory(prefix="patchkit-bench-") as folder:
            measure(Path(folder), args.cpu, functions, args.stock)
    except PatchkitError as error:
        CONSOLE.print(f"bench: {error}", markup=False)
        return error.exit_code
    return 0


def measure(folder: Path, host: str, functions: str, stock: Path | None) -> None:
    order = NcclOrder(
        origin=find_origin("nccl", RELEASE),
        request=Request(target=targets()["gb10"]),
        toolchain=find_toolchain(host, toolkits()[0].cuda),
        functions=functions,
        jobs=jobs_for(JOB_MEMORY).number,
        fresh=True,
    )
    tree = unpack(order.origin.path, folder / "source")
    plain = make(order, tree, folder / "build")
    CONSOLE.print(f"make: {plain.wall:.0f} s")
    built = patchkit(order, folder / "house")
    CONSOLE.print(f"build: {built.wall:.0f} s")
    rows = {"make": plain, "build": built}
    CONSOLE.print(
        table(rows, f"NCCL {order.version}, {order.gencode}, {host}, {order.jobs} jobs")
    )
    wheel = next((folder / "house").glob("*.whl"))
    reduced = ", of the reduced library" if functions else ""
    CONSOLE.print(f"wheel: {wheel.stat().st_size / 1e6:.1f} MB{reduced}")
    if stock and not reduced:
        ratio = wheel.stat().st_size / stock.stat().st_size
        CONSOLE.print(
            f"stock: {stock.stat().st_size / 1e6:.1f} MB, ours is {ratio:.3f} of it"
        )


def make(order: NcclOrder, tree: Path, build: Path) -> Cost:
    """NCCL's own build, as its README says it."""
    tools = order.toolchain
    command = [
        "make",
        "-C",
        str(tree / "src"),
        "lib",
        f"-j{order.jobs}",
        f"BUILDDIR={build}",
    ]
    command += [f"CUDA_HOME={tools.nvcc.parents[1]}", f"CUDA_INC={tools.include}"]
    command += [f"CUDA_LIB={tools.lib}", f"NVCC={tools.nvcc}", f"CXX={tools.cxx}"]
    command += [f"NVCC_GENCODE={order.gencode}", f"ONLY_FUNCS={order.functions}"]
    return timed(command)


def patchkit(order: NcclOrder, house: Path) -> Cost:
    command = [
        sys.executable,
        "-m",
        "patchkit",
        "build",
        "nccl",
        "--version",
        order.version,
    ]
    command += [
        "--cpu",
        order.toolchain.machine,
        "--functions",
        order.functions,
        "--fresh",
    ]
    return timed([*command, "--jobs", str(order.jobs), "--dir", str(house)])


def timed(command: list[str]) -> Cost:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    env = {**os.environ, "CCACHE_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        raise ProofError(
            f"{command[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(
        wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    )


def table(rows: dict[str, Cost], title: str) -> Table:
    found = Table(title=title, title_justify="left")
    for column in ("", "wall s", "of make", "CPU s", "of make"):
        found.add_column(column, justify="right")
    floor = rows["make"]
    for name, cost in rows.items():
        ratios = f"{cost.wall / floor.wall:.2f}", f"{cost.cpu / floor.cpu:.2f}"
        found.add_row(name, f"{cost.wall:.0f}", ratios[0], f"{cost.cpu:.0f}", ratios[1])
    return found


if __name__ == "__main__":
    sys.exit(main())
