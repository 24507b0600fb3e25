"""Build a wheel of vLLM: `patchkit build vllm`."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import click

from patchkit.cli import complete
from patchkit.cli.options import Selection, request_options
from patchkit.cli.out import tell
from patchkit.cli.progress import progress
from patchkit.cli.render import Block, rendered
from patchkit.cli.wheel.build_options import BuildOptions, build_options, built_blocks, plan_blocks
from patchkit.errors import UsageError
from patchkit.extras import BUILD, require_libraries
from patchkit.patching.recipe import load_recipe
from patchkit.quoting import quoted
from patchkit.recipes.vllm.build import by_option, with_targets
from patchkit.recipes.vllm.leave_out import idle_sources
from patchkit.source.tree import SourceTree
from patchkit.target import Target
from patchkit.wheel.build.machine import namespace_words, network
from patchkit.wheel.build.toolchain import MACHINES, find_toolchain
from patchkit.wheel.vllm.from_source import JOB_MEMORY, build_vllm
from patchkit.wheel.vllm.inputs import parse_given
from patchkit.wheel.vllm.needs import WITHOUT_RUST, plan_vllm
from patchkit.wheel.vllm.prepare import check_choice
from patchkit.wheel.vllm.source import VllmOrder, vllm_source
from patchkit.wheel.wheelhouse.contents import check_room

_EPILOG = """\
\b
On a Spark:
  patchkit build vllm --version 0.25.1
Without extensions whose sources cannot be had, CUTLASS from a folder:
  patchkit build vllm --version 0.25.1 --source cutlass=cutlass-4.4.2 \\
    --without flash-attn --without flashmla
For an H200, to test there:
  patchkit build vllm --version 0.25.1 --target h200
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--version",
    "version",
    shell_complete=complete.releases("vllm"),
    metavar="X.Y.Z",
    help="Release to build.  [default: the newest known one]",
)
@click.option("--src", "folder", metavar="SOURCE", help="Sources instead: a folder or an sdist.")
@request_options
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="NAME=WHAT",
    help="A folder, archive or git commit with the source of another project.",
)
@click.option(
    "--requirements",
    type=click.Path(path_type=Path, exists=True),
    help="Requirements of the environment, with hashes.  [default: the recipe's]",
)
@click.option("--extensions", default="", metavar="A,B", help="Only these, for tests.")
@build_options
@rendered
def command(
    selection: Selection,
    options: BuildOptions,
    version: str | None,
    folder: str | None,
    sources: tuple[str, ...],
    requirements: Path | None,
    extensions: str,
) -> Iterator[Block]:
    """Build vLLM for one device from its sources; `patchkit repack` takes seconds instead."""
    require_libraries(BUILD, "build")
    began = time.monotonic()
    fixes = {fix.id for fix in load_recipe().fixes}
    # --without takes the names of fixes, and of extensions that are left out.
    left_out = frozenset(it.option for it in by_option(sorted(selection.skip - fixes)))
    request = replace(selection, skip=selection.skip & fixes).request()
    machine = _built_for(request.target, options.cpu)
    given, parts = parse_given(sources), frozenset(filter(None, extensions.split(",")))
    jobs = options.jobs_for(JOB_MEMORY)
    idle: dict[str, str] = {}

    def look(tree: SourceTree) -> None:
        """Look at the sources before anything else is fetched."""
        idle.update(idle_sources(tree, request, given.keys() | left_out | with_targets(parts)))
        without = left_out | idle.keys()
        check_choice(tree, without=without, extensions=parts, given=given)

    offline = options.offline
    with progress() as report:
        source = vllm_source(version, folder, check=look, report=report, offline=offline)
        plan = plan_vllm(source.needs, source.version, machine, requirements)
        if source.needs.rust:
            tell(WITHOUT_RUST)
        if options.dry_run:
            yield from plan_blocks(plan, jobs)
            return
        plan.require()
        toolchain = find_toolchain(machine, offline=offline, progress=report("CUDA toolkit"))
    # Its paths are absolute, since the build runs in a work folder.
    order = VllmOrder(
        source=source.path,
        identity=source.identity,
        version=source.version,
        torch=source.needs.torch,
        request=request,
        toolchain=toolchain,
        requirements=requirements and requirements.absolute(),
        jobs=jobs.number,
        without=left_out | idle.keys(),
        given=given,
        extensions=parts,
        offline=offline,
        fresh=options.fresh,
    )
    # Space and rights are checked before the build, not when it is done.
    check_room(options.house, order.expected)
    tell(f"compiling in {order.work} with {jobs.number} jobs ({jobs.reason})")
    tell(f"what the build says: {order.work}/log.txt")
    _tell_left_out(order, idle)
    with progress("steps") as report:
        built = build_vllm(order, report)
    facts = built.facts
    lines = [
        *(f"{name}: {what}" for name, what in facts["environment"].items()),
        *(f"{name}: {what}" for name, what in facts["externals"].items()),
        *built.circumstances,
        *built.proofs,
    ]
    what = f"vllm {order.version}", f"{order.request.target.title}, {facts['archs']}"
    fields = {"proofs": built.proofs, "circumstances": built.circumstances}
    yield from built_blocks(
        built, options.house, began, what, order.toolchain, lines, reduced=bool(parts), **fields
    )


def _built_for(device: Target, cpu: str | None) -> str:
    """Return the CPU to build for. Raises UsageError for one that this machine cannot build for."""
    here = platform.machine()
    # On x86-64 there are wheels and compilers for either; on Arm nobody made x86-64's.
    within = (here,) if here == "aarch64" else MACHINES
    if cpu is not None and cpu not in within:
        raise UsageError(
            f"vLLM for {cpu} cannot be built on {here}",
            why="the toolkit for another CPU is locked for x86-64 machines alone",
            hint=f"build on a machine with {cpu}; or take upstream's kernels: "
            f"{quoted('patchkit', 'repack', 'vllm==X.Y.Z', '--cpu', cpu)}",
        )
    built_for = cpu or (device.cpu if device.cpu in within else here)
    if built_for != device.cpu:
        tell(f"for {built_for}: a wheel for tests; {device.title} has {device.cpu}")
    return built_for


def _tell_left_out(order: VllmOrder, idle: Mapping[str, str]) -> None:
    """Say what is left out and what that costs, before it takes long."""
    for reason in sorted(set(idle.values())):
        options = ", ".join(option for option in sorted(idle) if idle[option] == reason)
        tell(f"without {options}: {reason}; --source NAME=… brings one in")
    for extension in by_option(sorted(order.without - idle.keys())):
        if extension.serves(order.request.target.major, order.version):
            tell(f"without {extension.option}: {extension.cost}")
    if not namespace_words():
        tell(network())
