"""Build a wheel of libnccl or of vLLM: `patchkit build`."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from patchkit.cli import complete
from patchkit.cli.options import Selection, request_options, target_option
from patchkit.cli.out import PRESENT_PATH, tell
from patchkit.cli.progress import progress
from patchkit.cli.render import Block, VerbGroup, lead_word, rendered
from patchkit.cli.wheel.build_options import build_options, built_blocks, plan_blocks
from patchkit.errors import UsageError
from patchkit.extras import BUILD, require_libraries
from patchkit.patching.recipe import load_recipe
from patchkit.quoting import quoted
from patchkit.recipes.vllm.build import WITHOUT_RUST, by_option
from patchkit.source.nccl import nccl_tree
from patchkit.source.releases import named_version
from patchkit.target import DEFAULT_TARGET, Target, targets, toolkit_of, toolkits
from patchkit.wheel.build.machine import (
    BuildPlan,
    Jobs,
    jobs_for,
    namespace_words,
    network,
    plan_vllm,
)
from patchkit.wheel.build.nccl import JOB_MEMORY as NCCL_JOB_MEMORY
from patchkit.wheel.build.nccl import NcclOrder, build_nccl
from patchkit.wheel.build.toolchain import MACHINES, find_toolchain, missing_tools
from patchkit.wheel.device.inspect import LIVE
from patchkit.wheel.vllm.from_source import JOB_MEMORY as VLLM_JOB_MEMORY
from patchkit.wheel.vllm.from_source import build_vllm
from patchkit.wheel.vllm.inputs import parse_given
from patchkit.wheel.vllm.prepare import choose_idle
from patchkit.wheel.vllm.source import VllmOrder, vllm_source
from patchkit.wheel.wheelhouse.contents import check_room
from patchkit.wheel.wheelhouse.overrides import default_version, require_wanted


@click.group(cls=VerbGroup)
def build_command() -> None:
    """Build a wheel into the wheelhouse."""


@build_command.command("nccl")
@click.option(
    "--version",
    shell_complete=complete.complete_kind("nccl"),
    metavar="X.Y.Z",
    help="Release to build.  [default: the one that torch pins]",
)
@click.option(
    "--src", "source", metavar="SOURCE", help="A folder, an archive, or a git commit."
)
@click.option("--sha256", metavar="HEX", help="What an unknown archive must have.")
@target_option
@click.option(
    "--functions", default="", metavar="TEXT", help="Only these kernels, for tests."
)
@click.option(
    "--cuda",
    type=click.Choice([row.cuda for row in toolkits()]),
    help="Which nvcc.  [default: the target's, whose code every driver of CUDA 13 loads]",
)
@build_options
@rendered
def build_nccl_wheel(
    house: Path, cpu: str | None, target: str | None, *, offline: bool, **given: Any
) -> Iterator[Block]:
    """Build libnccl for one device: the wheel replaces stock's nvidia-nccl-cu13.

    \b
      patchkit build nccl
      patchkit build nccl --version 2.29.7 --target thor
      patchkit build nccl --src git+https://github.com/NVIDIA/nccl@<40 hex digits>

    On a Spark, or across from x86-64 (apt install g++-aarch64-linux-gnu).
    """
    if not given["dry_run"]:
        require_libraries(BUILD, "build")
    began = time.monotonic()
    device = targets()[target or DEFAULT_TARGET]
    row = next(row for row in toolkits() if row.cuda == (given["cuda"] or device.cuda))
    device = replace(device, cuda=row.cuda)
    spec = _nccl_source(given["version"], given["source"], house)
    machine = cpu or device.cpu
    missing = tuple(missing_tools(machine))
    plan = BuildPlan(title=spec.replace("nccl==", "NCCL "), missing=missing)
    jobs = jobs_for(NCCL_JOB_MEMORY, given["jobs"])
    if given["dry_run"]:
        yield from plan_blocks(plan, jobs)
        return
    plan.require()
    with progress() as report:
        check = load_recipe("nccl").check
        origin = nccl_tree(spec, sha256=given["sha256"], offline=offline, check=check)
        require_wanted(house, origin.version)
        bar = report("CUDA toolkit")
        tools = find_toolchain(machine, row, offline=offline, progress=bar)
    order = NcclOrder(
        origin=origin,
        target=device,
        toolchain=tools,
        functions=given["functions"],
        jobs=jobs.number,
        fresh=given["fresh"],
    )
    # Space and rights are checked before the build, not when it is done.
    check_room(house, order.expected)
    tell(
        f"compiling in {order.work} with {order.jobs} jobs; what make says: {order.work}/log.txt"
    )
    with progress("objects") as report:
        built = build_nccl(order, report("compiling"))
    what = (
        f"nccl {order.version}",
        f"{device.title}, {order.gencode.rpartition('=')[2]}",
    )
    lines = []
    for binary in built.binaries:
        live = (code for code in binary.codes if code.section == LIVE)
        lines.append(
            f"{binary.name}: {', '.join(f'{code.count} {code.name}' for code in live)}"
        )
    lines.append(f"every kernel of NCCL is exact for {device.title}")
    bugs = load_recipe("nccl").bugs_of(origin.version)
    notes = [lead_word("known") + f"{bug.says}; instead: {bug.instead}" for bug in bugs]
    reduced = bool(given["functions"])
    yield from built_blocks(
        built, house, began, what, tools, lines, reduced=reduced, notes=notes
    )


def _nccl_source(version: str | None, source: str | None, house: Path) -> str:
    """Return which sources to take. Raises UsageError for a release that the wheelhouse refuses."""
    if version is not None and source is not None:
        raise UsageError(
            "--version and --src exclude each other: the sources say their version"
        )
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


@build_command.command("vllm")
@click.option(
    "--version",
    shell_complete=complete.complete_kind("vllm"),
    metavar="X.Y.Z",
    help="Release to build.  [default: the newest known one]",
)
@click.option(
    "--src", "folder", metavar="SOURCE", help="Sources instead: a folder or an sdist."
)
@request_options
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="NAME=WHAT",
    help="A project's source: a folder, an archive, a git commit, or upstream's wheel.",
)
@click.option(
    "--requirements", type=PRESENT_PATH, help="Another lock of the environment."
)
@click.option("--extensions", default="", metavar="A,B", help="Only these, for tests.")
@build_options
@rendered
def build_vllm_wheel(
    selection: Selection,
    house: Path,
    requirements: Path | None,
    *,
    offline: bool,
    **options: Any,
) -> Iterator[Block]:
    """Build vLLM for one device from its sources; `patchkit repack` takes seconds instead."""
    if not options["dry_run"]:
        require_libraries(BUILD, "build")
    began = time.monotonic()
    fixes = {fix.id for fix in load_recipe().fixes}
    # --without takes the names of fixes, and of extensions that are left out.
    left_out = frozenset(it.option for it in by_option(sorted(selection.skip - fixes)))
    request = replace(selection, skip=selection.skip & fixes).request()
    machine = _built_for(request.target, options["cpu"])
    given = parse_given(options["sources"])
    parts = frozenset(filter(None, options["extensions"].split(",")))
    jobs = jobs_for(VLLM_JOB_MEMORY, options["jobs"])
    idle: dict[str, str] = {}
    with progress() as report:
        # The sources are looked at before anything else is fetched.
        source = vllm_source(
            options["version"],
            options["folder"],
            check=lambda tree: idle.update(
                choose_idle(tree, request, left_out, parts, given)
            ),
            report=report,
            offline=offline,
        )
        plan = plan_vllm(source.needs, source.version, machine, requirements)
        if source.needs.rust:
            tell(WITHOUT_RUST)
        if options["dry_run"]:
            yield from plan_blocks(plan, jobs)
            return
        plan.require()
        request = replace(request, target=request.target.with_torch(source.needs.torch))
        row, bar = toolkit_of(source.needs.torch), report("CUDA toolkit")
        tools = find_toolchain(machine, row, offline=offline, progress=bar)
    # Its paths are absolute, since the build runs in a work folder.
    order = VllmOrder(
        source=source.path,
        identity=source.identity,
        version=source.version,
        torch=source.needs.torch,
        request=request,
        toolchain=tools,
        requirements=requirements and requirements.absolute(),
        jobs=jobs.number,
        without=left_out | idle.keys(),
        given=given,
        extensions=parts,
        offline=offline,
        fresh=options["fresh"],
    )
    check_room(house, order.expected)
    _tell_start(order, jobs, idle)
    with progress("steps") as report:
        built = build_vllm(order, report)
    inputs = (built.facts["environment"] | built.facts["externals"]).items()
    lines = [
        *(f"{name}: {it}" for name, it in inputs),
        *built.circumstances,
        *built.proofs,
    ]
    what = (
        f"vllm {order.version}",
        f"{order.request.target.title}, {built.facts['archs']}",
    )
    notes = [lead_word("note") + note for note in built.notes]
    fields = {
        "proofs": built.proofs,
        "circumstances": built.circumstances,
        "notes": notes,
    }
    yield from built_blocks(
        built, house, began, what, tools, lines, reduced=bool(parts), **fields
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


def _tell_start(order: VllmOrder, jobs: Jobs, idle: Mapping[str, str]) -> None:
    """Say where it is built, what is left out and what that costs, before it takes long."""
    tell(f"compiling in {order.work} with {jobs.number} jobs ({jobs.reason})")
    tell(f"what the build says: {order.work}/log.txt")
    for reason in sorted(set(idle.values())):
        options = ", ".join(option for option in sorted(idle) if idle[option] == reason)
        tell(f"without {options}: {reason}; --source NAME=… brings one in")
    if names := ", ".join(
        sorted({it.option for it in order.taken} - order.given.keys())
    ):
        tell(f"{names}: upstream's wheel has them; --source NAME=… compiles one")
    for extension in by_option(sorted(order.without - idle.keys())):
        if extension.serves(order.request.target.major, order.version):
            tell(f"without {extension.option}: {extension.cost}")
    if not namespace_words():
        tell(network())
