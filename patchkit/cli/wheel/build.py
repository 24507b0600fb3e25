"""Build a wheel of libnccl: `patchkit build nccl`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import click

from patchkit.cli import complete
from patchkit.cli.options import find_target, target_option
from patchkit.cli.out import tell
from patchkit.cli.progress import progress
from patchkit.cli.render import Block, VerbGroup, lead_word, rendered
from patchkit.cli.wheel.build_options import BuildOptions, build_options, built_blocks, plan_blocks
from patchkit.cli.wheel.build_vllm import command as vllm
from patchkit.errors import UsageError
from patchkit.extras import BUILD, require_libraries
from patchkit.patching.recipe import load_recipe
from patchkit.source.nccl import nccl_tree
from patchkit.versions import named_version
from patchkit.wheel.build.machine import BuildPlan
from patchkit.wheel.build.nccl import JOB_MEMORY, NcclOrder, build_nccl
from patchkit.wheel.build.toolchain import find_toolchain, missing_tools
from patchkit.wheel.device.inspect import LIVE
from patchkit.wheel.wheelhouse.contents import check_room
from patchkit.wheel.wheelhouse.overrides import default_version, require_wanted

_EPILOG = """\
\b
On a Spark, or across from x86-64 (apt install g++-aarch64-linux-gnu):
  patchkit build nccl
The release that Debian has, for a Thor:
  patchkit build nccl --version 2.29.7 --target thor
A commit of upstream:
  patchkit build nccl --src git+https://github.com/NVIDIA/nccl@<40 hex digits>
"""


@click.group(cls=VerbGroup)
def command() -> None:
    """Build a wheel into the wheelhouse."""


command.add_command(vllm, "vllm")


@command.command(epilog=_EPILOG)
@click.option(
    "--version",
    "version",
    shell_complete=complete.releases("nccl"),
    metavar="X.Y.Z",
    help="Release to build.  [default: the one that torch pins]",
)
@click.option(
    "--src", "source", metavar="SOURCE", help="Sources: a folder, an archive, or a git commit."
)
@click.option(
    "--sha256", metavar="HEX", help="SHA-256 of an archive that the recipe does not know."
)
@target_option
@click.option(
    "--functions", default="", metavar="TEXT", help="Only these kernels (ONLY_FUNCS), for tests."
)
@build_options
@rendered
def nccl(
    version: str | None,
    source: str | None,
    sha256: str | None,
    target: str | None,
    functions: str,
    options: BuildOptions,
) -> Iterator[Block]:
    """Build libnccl for one device: the wheel replaces stock's nvidia-nccl-cu13."""
    require_libraries(BUILD, "build")
    began, house, offline = time.monotonic(), options.house, options.offline
    device = find_target(target or "gb10")
    spec = _nccl_source(version, source, house)
    machine = options.cpu or device.cpu
    missing = tuple(missing_tools(machine))
    plan = BuildPlan(title=spec.replace("nccl==", "NCCL "), missing=missing)
    jobs = options.jobs_for(JOB_MEMORY)
    if options.dry_run:
        yield from plan_blocks(plan, jobs)
        return
    plan.require()
    with progress() as report:
        check = load_recipe("nccl").check
        origin = nccl_tree(spec, sha256=sha256, offline=offline, check=check)
        require_wanted(house, origin.version)
        tools = find_toolchain(machine, offline=offline, progress=report("CUDA toolkit"))
    order = NcclOrder(
        origin=origin,
        target=device,
        toolchain=tools,
        functions=functions,
        jobs=jobs.number,
        fresh=options.fresh,
    )
    # Space and rights are checked before the build, not when it is done.
    check_room(house, order.expected)
    tell(f"compiling in {order.work} with {order.jobs} jobs; what make says: {order.work}/log.txt")
    with progress("objects") as report:
        built = build_nccl(order, report("compiling"))
    what = f"nccl {order.version}", f"{device.title}, {order.gencode.rpartition('=')[2]}"
    lines = []
    for binary in built.binaries:
        live = (code for code in binary.codes if code.section == LIVE)
        lines.append(f"{binary.name}: {', '.join(f'{code.count} {code.name}' for code in live)}")
    lines.append(f"every kernel of NCCL is exact for {device.title}")
    bugs = load_recipe("nccl").bugs_of(origin.version)
    notes = [lead_word("known") + f"{bug.says}; instead: {bug.instead}" for bug in bugs]
    yield from built_blocks(
        built, house, began, what, tools, lines, reduced=bool(functions), notes=notes
    )


def _nccl_source(version: str | None, source: str | None, house: Path) -> str:
    """Return which sources to take. Raises UsageError for a release that the wheelhouse refuses."""
    if version is not None and source is not None:
        raise UsageError("--version and --src exclude each other: the sources say their version")
    if source is not None:
        return source
    if version is None:
        chosen, reason = default_version(house)
        tell(f"NCCL {chosen}: {reason}")
        return f"nccl=={chosen}"
    exact = named_version(version, "for example 2.30.7")
    require_wanted(house, exact)
    load_recipe("nccl").check(exact)
    return f"nccl=={version}"
