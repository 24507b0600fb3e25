"""Build a wheel of vLLM: `patchkit build vllm`."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from patchkit.cli import complete
from patchkit.cli.options import Selection, request_options
from patchkit.cli.out import style, tell
from patchkit.cli.progress import progress
from patchkit.cli.render import Block, lead_word, rendered
from patchkit.cli.wheel.build_options import (
    build_options,
    chosen_jobs,
    compilers,
    placed_blocks,
    plan_blocks,
)
from patchkit.errors import UsageError
from patchkit.extras import require_build
from patchkit.patching.fix import Request
from patchkit.patching.plan import make_plan
from patchkit.patching.recipe import load_recipe
from patchkit.quoting import quoted
from patchkit.recipes.vllm.build import by_option, with_targets
from patchkit.recipes.vllm.idle import idle_sources
from patchkit.recipes.vllm.sources import counts, planned_sources
from patchkit.source.resolve import Report
from patchkit.source.tree import SourceTree
from patchkit.target import Target
from patchkit.wheel.build.machine import Jobs, can_cut_off, network
from patchkit.wheel.build.make import BuiltWheel
from patchkit.wheel.build.toolchain import MACHINES, find_toolchain
from patchkit.wheel.vllm.from_source import JOB_MEMORY, build_vllm
from patchkit.wheel.vllm.inputs import parse_given
from patchkit.wheel.vllm.preflight import left_out as left_out_parts
from patchkit.wheel.vllm.preflight import plan_vllm
from patchkit.wheel.vllm.prepare import check_choice, choose_parts
from patchkit.wheel.vllm.source import VllmOrder, VllmSource, vllm_source
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


_exists = click.Path(path_type=Path, exists=True)


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
    "given",
    multiple=True,
    metavar="NAME=WHAT",
    help="A folder, archive or wheel with the source of another project.",
)
@click.option(
    "--cuda", metavar="DIR|locked", default="locked", show_default=True, help="The CUDA toolkit."
)
@click.option(
    "--python",
    type=_exists,
    help="Interpreter with torch and build tools.  [default: a locked environment]",
)
@click.option(
    "--requirements",
    type=_exists,
    help="Requirements of the environment, with hashes.  [default: the recipe's]",
)
@click.option("--extensions", default="", metavar="A,B", help="Only these, for tests.")
@build_options
@rendered
def command(selection: Selection, **chosen: Any) -> Iterator[Block]:
    """Build vLLM for one device from its sources; `patchkit repack` takes seconds instead."""
    require_build()
    began = time.monotonic()
    options = _Options(**chosen)
    request, left_out = _split_selection(selection)
    target = request.target
    machine = _built_for(target, options.cpu, options.python)
    number = chosen_jobs(options.jobs, JOB_MEMORY)
    toolkit = None if options.cuda == "locked" else Path(options.cuda)
    with progress() as report:
        found = _find_sources(options, request, left_out, report)
        plan = plan_vllm(
            found.source,
            machine=machine,
            cuda=target.cuda,
            python=options.python,
            requirements=options.requirements,
            compiles=found.compiles,
        )
        if not options.dry_run:
            plan.require()
            toolchain = find_toolchain(
                machine,
                cuda=target.cuda,
                toolkit=toolkit,
                locked=toolkit is None,
                offline=options.offline,
                progress=report("CUDA toolkit"),
            )
    for note in left_out_parts(found.source.needs):
        tell(note)
    if options.dry_run:
        yield from plan_blocks(plan, number)
        return
    # Its paths are absolute, since the build runs in a work folder.
    order = VllmOrder(
        source=found.source.path,
        identity=found.source.identity,
        version=found.source.version,
        torch=found.source.needs.torch,
        request=request,
        toolchain=toolchain,
        python=options.python and options.python.absolute(),
        requirements=options.requirements and options.requirements.absolute(),
        jobs=number.number,
        without=left_out | found.idle.keys(),
        given=parse_given(options.given),
        extensions=options.parts,
        offline=options.offline,
        fresh=options.fresh,
    )
    # Space and rights are checked before the build, not when it is done.
    check_room(options.house, order.expected)
    _foretell(order, number, found.idle)
    with progress("steps") as report:
        built = build_vllm(order, report)
    yield from _built_blocks(order, built, options.house, began)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """Hold what the command line says, but for the selection of fixes."""

    version: str | None
    folder: str | None
    cpu: str | None
    jobs: int | None
    given: tuple[str, ...]
    cuda: str
    python: Path | None
    requirements: Path | None
    extensions: str
    fresh: bool
    offline: bool
    house: Path
    dry_run: bool

    @property
    def parts(self) -> frozenset[str]:
        """Return the extensions that are built alone."""
        return frozenset(filter(None, self.extensions.split(",")))


@dataclass(frozen=True, slots=True, kw_only=True)
class _BuildInputs:
    """The sources, what is idle and why, and what is compiled."""

    source: VllmSource
    idle: Mapping[str, str]
    compiles: Sequence[str]


def _find_sources(
    options: _Options, request: Request, left_out: frozenset[str], report: Report
) -> _BuildInputs:
    """Find the sources, and look at them before anything else is fetched."""
    idle: dict[str, str] = {}
    compiles: list[str] = []
    sources, parts = parse_given(options.given), options.parts

    def check(tree: SourceTree) -> None:
        idle.update(idle_sources(tree, request, sources.keys() | left_out | with_targets(parts)))
        without = left_out | idle.keys()
        check_choice(tree, without=without, extensions=parts, given=sources)
        if options.dry_run:
            # What the release's own CMake would compile for the device, of its patched tree.
            patched = make_plan(tree, load_recipe(), request).patched
            reduced, target = choose_parts(patched, without, parts), request.target
            planned = planned_sources(reduced, target, request.arch_list, target.cuda)
            found = counts(planned, target)
            names = ", ".join(f"{it.sources} of {it.library}" for it in found)
            total = sum(it.sources for it in found)
            compiles.append(f"to compile: {total} CUDA sources, {names}; and C++ beside them")

    source = vllm_source(
        options.version, options.folder, check=check, report=report, offline=options.offline
    )
    return _BuildInputs(source=source, idle=idle, compiles=compiles)


def _split_selection(selection: Selection) -> tuple[Request, frozenset[str]]:
    """Return the request, and the extensions left out: --without takes both's names."""
    fixes = {fix.id for fix in load_recipe().fixes}
    extensions = by_option(sorted(selection.skip - fixes))
    request = replace(selection, skip=selection.skip & fixes).request()
    return request, frozenset(extension.option for extension in extensions)


def _built_for(device: Target, cpu: str | None, python: Path | None) -> str:
    """Return the CPU to build for.

    Raises UsageError for one that this machine, or the interpreter named, cannot build for.
    """
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
    if python and built_for != here:
        raise UsageError(
            f"--python {python}: its torch is for {here}, the wheel for {built_for}",
            why="a build for another CPU links with the torch of that one",
            hint=f"leave --python out, or build for this machine: --cpu {here}",
        )
    if built_for != device.cpu:
        tell(f"for {built_for}: a wheel for tests; {device.title} has {device.cpu}")
    return built_for


def _foretell(order: VllmOrder, jobs: Jobs, idle: Mapping[str, str]) -> None:
    """Say what is going to happen, before it takes long."""
    tell(f"compiling in {order.work} with {jobs.number} jobs ({jobs.reason})")
    tell(f"what the build says: {order.work}/log.txt")
    for reason in sorted(set(idle.values())):
        options = ", ".join(option for option in sorted(idle) if idle[option] == reason)
        tell(f"without {options}: {reason}; --source NAME=… brings one in")
    for extension in by_option(sorted(order.without - idle.keys())):
        if extension.serves(order.request.target.major, order.version):
            tell(f"without {extension.option}: {extension.cost}")
    if not can_cut_off():
        tell(network())


def _built_blocks(
    order: VllmOrder, built: BuiltWheel, house: Path, began: float
) -> Iterator[Block]:
    target, archs = order.request.target, built.facts["archs"]
    across = f" on {platform.machine()}" if order.across else ""
    title = style(f"vllm {order.version}", bold=True)
    title += f"  →  {target.title}, {archs}, {order.toolchain.machine}{across}"
    lines = [
        compilers(order.toolchain),
        *(f"{name}: {what}" for name, what in built.facts["environment"].items()),
        *(f"{name}: {what}" for name, what in built.facts["externals"].items()),
        *built.circumstances,
        *built.proofs,
    ]
    notes = [lead_word("note") + "reduced: for tests, not for use"] if order.extensions else []
    fields = {"proofs": built.proofs, "circumstances": built.circumstances}
    yield from placed_blocks(built, house, began, title, lines, notes=notes, fields=fields)
