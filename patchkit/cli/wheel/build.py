"""Build wheels, or repack released ones: `patchkit build`, `patchkit repack`."""

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from patchkit.cli.options import (
    Selection,
    choose_sandbox,
    proof_lines,
    request_options,
    verdict_fields,
    verdict_lines,
)
from patchkit.cli.out import (
    Shown,
    bold,
    next_step,
    pip,
    progress,
    record_fields,
    tell,
)
from patchkit.cli.render import (
    GOOD,
    Blocks,
    ExitCode,
    Record,
    VerbGroup,
    finding_blocks,
    lead_word,
    note,
    option,
    options_of,
    rendered,
)
from patchkit.errors import UsageError
from patchkit.finding import worst
from patchkit.frozen import Fields
from patchkit.patching.fix import Request, State
from patchkit.patching.recipe import load_recipe
from patchkit.quoting import quoted
from patchkit.recipes.vllm.build import WITHOUT_RUST, by_option
from patchkit.runtime.rules.presets import named_preset
from patchkit.runtime.serve.command_notes import MODULES
from patchkit.source.releases import named_version
from patchkit.source.resolve import find_origin, locked_origin
from patchkit.source.tree import SourceTree
from patchkit.target import DEFAULT_TARGET, Load, Target, targets, toolkits
from patchkit.units import BYTES_PER_GIB
from patchkit.wheel.build.compiled import BuiltWheel, CompileOrder
from patchkit.wheel.build.flashinfer import FlashInferOrder, build_flashinfer
from patchkit.wheel.build.machine import (
    MACHINES,
    BuildPlan,
    Jobs,
    find_toolchain,
    jobs_for,
    missing_tools,
    plan_vllm,
)
from patchkit.wheel.build.nccl import JOB_MEMORY as NCCL_JOB_MEMORY
from patchkit.wheel.build.nccl import NcclOrder, build_nccl
from patchkit.wheel.device.libraries import Judged, Use
from patchkit.wheel.file.wheelfile import ANY, WheelName
from patchkit.wheel.native.assemble import Assembler
from patchkit.wheel.repack.repack import find_wheel, repack_wheel
from patchkit.wheel.vllm.from_source import JOB_MEMORY as VLLM_JOB_MEMORY
from patchkit.wheel.vllm.from_source import (
    VllmOrder,
    build_vllm,
    choose_idle,
    vllm_source,
)
from patchkit.wheel.vllm.inputs import parse_given
from patchkit.wheel.wheelhouse.overrides import (
    default_version,
    require_wanted,
    wanted_release,
)
from patchkit.wheel.wheelhouse.storage import (
    add_wheel,
    check_folder,
    check_room,
    load_manifest,
)


@click.group(cls=VerbGroup)
def build_command() -> None:
    """Build a wheel into the wheelhouse."""


@build_command.command("nccl")
@options_of("build-nccl")
@option(
    "--cuda",
    "CUDA of nvcc; default: the target's.",
    type=click.Choice([row.cuda for row in toolkits()]),
)
@options_of("build")
@rendered
def build_nccl_wheel(
    house: Path, cpu: str | None, target: str | None, **options: Any
) -> Blocks:
    """Build libnccl for one device: the wheel replaces stock's nvidia-nccl-cu13.

    \b
      patchkit build nccl
      patchkit build nccl --version 2.29.7 --target thor
      patchkit build nccl --src git+https://github.com/NVIDIA/nccl@<40 hex digits>

    On a Spark, or across from x86-64 (apt install g++-aarch64-linux-gnu).
    """
    began = time.monotonic()
    device = targets()[target or DEFAULT_TARGET]
    device = replace(device, cuda=options["cuda"] or device.cuda)
    spec = _nccl_source(options["version"], options["source"], house)
    machine = cpu or device.cpu
    plan = BuildPlan(
        title=spec.replace("nccl==", "NCCL "), missing=tuple(missing_tools(machine))
    )
    jobs = jobs_for(NCCL_JOB_MEMORY, options["jobs"])
    if options["dry_run"]:
        yield from plan_blocks(plan, jobs)
        return
    plan.require()

    offline = options["offline"]

    recipe = load_recipe("nccl")
    with progress() as report:
        origin = find_origin(
            "nccl", spec, sha256=options["sha256"], offline=offline, check=recipe.check
        )
        require_wanted(house, origin.version)
        bar = report("CUDA toolkit")
        tools = find_toolchain(machine, device.cuda, offline=offline, progress=bar)

    order = NcclOrder(
        origin=origin,
        request=Request(target=device),
        toolchain=tools,
        functions=options["functions"],
        jobs=jobs.number,
        fresh=options["fresh"],
    )
    _prepare_house(order, house, f" with {jobs.number} jobs ({jobs.reason})")
    with progress("objects") as report:
        built = build_nccl(order, report("compiling"))

    notes = [
        lead_word("known") + f"{bug.says}; instead: {bug.instead}"
        for bug in recipe.bugs_of(origin.version)
    ]
    yield from built_blocks(
        built,
        house,
        began,
        title=f"nccl {order.version}",
        device=f"{device.title}, {order.gencode.rpartition('=')[2]}",
        checks=[f"every kernel of NCCL is exact for {device.title}"],
        notes=notes,
    )


def _nccl_source(version: str | None, source: str | None, house: Path) -> str:
    """Return the sources to build: a path, or ``nccl==VERSION``.

    Raises UsageError for both a version and sources, or a release that the wheelhouse refuses.
    """
    if version is not None and source is not None:
        what = "--version and --src exclude each other: the sources say their version"
        raise UsageError(what)
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


@build_command.command("flashinfer")
@options_of("build-flashinfer")
@options_of("build")
@rendered
def build_flashinfer_wheel(
    house: Path, cpu: str | None, target: str | None, **options: Any
) -> Blocks:
    """Compile FlashInfer's modules ahead of time, so that no first start compiles them.

    \b
      patchkit build flashinfer --version 0.6.16.post3
      patchkit build flashinfer --set moe
      patchkit build flashinfer --for openai/gpt-oss-120b

    On a Spark, or across from x86-64 (apt install g++-aarch64-linux-gnu).
    """
    began = time.monotonic()
    device = targets()[target or DEFAULT_TARGET]
    version = wanted_release(house, options["version"])
    names = _module_names(options)
    calls = MODULES.calls(str(version), device.major, names)
    if not calls:
        known = ", ".join(sorted({row.id for row in MODULES.generator}))
        raise UsageError(
            f"FlashInfer {version} has none of {', '.join(names)} for {device.title}",
            hint=f"--module takes {known}",
        )

    machine = cpu or device.cpu
    title = f"FlashInfer {version}, modules: {len(calls)}"
    plan = BuildPlan(title=title, missing=tuple(missing_tools(machine)))
    jobs = jobs_for(
        int(max(call.gib for call in calls) * BYTES_PER_GIB), options["jobs"]
    )
    if options["dry_run"]:
        yield from plan_blocks(plan, jobs)
        return
    plan.require()

    offline = options["offline"]
    with progress() as report:
        origin = locked_origin("flashinfer", version, report, offline=offline)
        bar = report("CUDA toolkit")
        tools = find_toolchain(machine, device.cuda, offline=offline, progress=bar)

    order = FlashInferOrder(
        origin=origin,
        request=Request(target=device),
        toolchain=tools,
        names=names,
        calls=calls,
        jobs=options["jobs"],
        offline=offline,
        fresh=options["fresh"],
    )
    _prepare_house(order, house)
    with progress("steps") as report:
        built = build_flashinfer(order, report("compiling"))

    yield from built_blocks(
        built,
        house,
        began,
        title=title,
        device=f"{device.title}, {device.native}",
        checks=["no module holds code for another device or family"],
        notes=[
            note("where no nvcc is on PATH, vLLM wants VLLM_HAS_FLASHINFER_CUBIN=1")
        ],
    )


def _module_names(options: Mapping[str, Any]) -> list[str]:
    """Return the sets and ids of generators that the user names; the small set for none."""
    names = {*options["modules"]}
    for model in options["models"]:
        names |= MODULES.generators_of(named_preset(model))
    if options["sets"] or not names:
        names.add(options["sets"] or "small")
    return sorted(names)


@build_command.command("vllm")
@options_of("build-vllm")
@request_options
@options_of("build-sources")
@options_of("build")
@rendered
def build_vllm_wheel(
    selection: Selection,
    house: Path,
    requirements: Path | None,
    **options: Any,
) -> Blocks:
    """Build vLLM for one device from its sources; `patchkit repack` takes seconds instead."""
    began = time.monotonic()
    fixes = {fix.id for fix in load_recipe("vllm").fixes}
    # --without names fixes and extensions: separate the two.
    skip = frozenset(selection.skip)
    left_out = skip - fixes
    by_option(sorted(left_out))  # raises for an unknown name
    request = replace(selection, skip=tuple(skip & fixes)).request()
    machine = _built_for(request.target, options["cpu"])
    sources = parse_given(options["sources"])
    parts = frozenset(filter(None, options["extensions"].split(",")))
    jobs = jobs_for(VLLM_JOB_MEMORY, options["jobs"])
    offline = options["offline"]
    idle: dict[str, str] = {}

    def find_idle(tree: SourceTree) -> None:
        idle.update(choose_idle(tree, request, left_out, parts, sources))

    with progress() as report:
        # Check the sources first, before anything large is fetched.
        source = vllm_source(
            options["version"],
            options["folder"],
            check=find_idle,
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
        torch = source.needs.torch
        bar = report("CUDA toolkit")
        target = request.target.with_torch(torch)
        tools = find_toolchain(machine, target.cuda, offline=offline, progress=bar)
    order = VllmOrder(
        origin=source,
        torch=torch,
        request=replace(request, target=target),
        toolchain=tools,
        # The build runs in another folder, so the path must be absolute.
        requirements=requirements and requirements.absolute(),
        jobs=jobs.number,
        without=left_out | idle.keys(),
        given=sources,
        extensions=parts,
        offline=offline,
        fresh=options["fresh"],
    )
    _prepare_house(order, house, f" with {jobs.number} jobs ({jobs.reason})")
    _tell_parts(order, idle)

    with progress("steps") as report:
        built = build_vllm(order, report)

    inputs = built.facts["environment"] | built.facts["externals"]

    checks = [f"{name}: {text}" for name, text in inputs.items()]
    yield from built_blocks(
        built,
        house,
        began,
        title=f"vllm {order.version}",
        device=f"{target.title}, {built.facts['archs']}",
        checks=checks,
        notes=list(map(note, built.notes)),
    )


def _built_for(device: Target, cpu: str | None) -> str:
    """Return the CPU to build for. Raises UsageError for one that this machine cannot build for."""
    machine = platform.machine()
    # x86-64 machines have wheels and compilers for both CPUs, Arm machines for Arm alone.
    possible = (machine,) if machine == "aarch64" else MACHINES
    if cpu is not None and cpu not in possible:
        repack = quoted("patchkit", "repack", "vllm==X.Y.Z", "--cpu", cpu)
        raise UsageError(
            f"vLLM for {cpu} cannot be built on {machine}",
            why="the toolkit for another CPU is locked for x86-64 machines alone",
            hint=f"build on a machine with {cpu}; or take upstream's kernels: {repack}",
        )

    built_for = cpu or (device.cpu if device.cpu in possible else machine)
    if built_for != device.cpu:
        tell(f"for {built_for}: a wheel for tests; {device.title} has {device.cpu}")
    return built_for


def _prepare_house(order: CompileOrder, house: Path, jobs: str = "") -> None:
    """Raise before a long build if space or rights are missing; tell where it runs."""
    check_room(house, order.expected)
    tell(f"compiling in {order.work}{jobs}")
    tell(f"what the build says: {order.work}/log.txt")


def _tell_parts(order: VllmOrder, idle: Mapping[str, str]) -> None:
    """Tell which parts a build of vLLM leaves out, and what that costs."""
    for reason in sorted(set(idle.values())):
        options = ", ".join(option for option in sorted(idle) if idle[option] == reason)
        tell(f"without {options}: {reason}; --source NAME=… brings one in")

    for extension in by_option(sorted(order.without - idle.keys())):
        if extension.serves(order.target.major, order.origin.version):
            tell(f"without {extension.option}: {extension.cost}")


def plan_blocks(plan: BuildPlan, jobs: Jobs) -> Blocks:
    """Yield a plan, and an exit code if tools are missing."""
    yield Record(
        {
            "dry_run": True,
            **record_fields(plan),
            "jobs": jobs.number,
        }
    )
    yield bold(plan.title) + f", with {jobs.number} jobs ({jobs.reason})"
    yield from finding_blocks(plan.missing)
    obstacle = worst(plan.missing)
    yield "dry run: nothing was compiled" if obstacle else GOOD + "it could start"
    yield ExitCode(obstacle)


def built_blocks(
    built: BuiltWheel,
    house: Path,
    began: float,
    *,
    title: str,
    device: str,
    checks: Sequence[str],
    notes: Sequence[str],
) -> Blocks:
    """Put a wheel into the wheelhouse; yield the report of its build, and the next steps.

    ``began`` is the time.monotonic() of the start. ``checks`` are lines about proofs, ``notes``
    lines to heed.
    """
    wheel = add_wheel(house, built.wheel, built.facts, say=tell)
    seconds = time.monotonic() - began
    yield Record(
        {
            "wheel": wheel,
            "facts": built.facts,
            "log": built.log,
            "seconds": round(seconds, 1),
            "proofs": built.proofs,
            "circumstances": built.circumstances,
        }
    )

    facts = built.facts
    machine = facts["machine"]
    if platform.machine() != machine:
        machine += f" on {platform.machine()}"

    yield bold(title) + f"  →  {device}, {machine}"
    yield GOOD + f"nvcc {facts['cuda']}, {facts['compiler']}"
    for check in (*checks, *built.circumstances, *built.proofs):
        yield GOOD + check
    yield GOOD + f"{wheel}  {wheel.stat().st_size / 1e6:.1f} MB, {seconds:.0f} s"
    if ".reduced." in wheel.name:
        yield note("reduced: for tests, not for use")

    yield from notes

    # add_wheel() may have made the folder, so its manifest can be read only now.
    overridden = {row.takes.project for row in load_manifest(house).overrides}
    is_overridden = WheelName(wheel.name).project in overridden
    options = ["--no-deps"] if is_overridden else []
    yield from install_steps(wheel, options)


def install_steps(wheel: Path, options: Sequence[str] = ()) -> Sequence[Shown]:
    """Return the commands that install a wheel here, or copy it to its device and install it."""
    cpus = WheelName(wheel.name).cpus
    if ANY in cpus or platform.machine() in cpus:
        return [next_step(*pip(), "install", *options, wheel)]

    where = f"to take it to its device, {' or '.join(sorted(cpus))}"
    words = ["pip", "install", *options, wheel.name]
    return [
        next_step(
            "rsync",
            "-P",
            wheel,
            "USER@HOST:",
            where=where,
        ),
        next_step(*words, where="there, in vLLM's environment"),
    ]


@click.command
@options_of("repack")
@request_options
@options_of("repack-wheel")
@rendered
def repack_command(
    wheel: str,
    selection: Selection,
    house: Path,
    trusted: bool,
    verbose: bool,
    **options: Any,
) -> Blocks:
    """Repack upstream's wheel with the fixes that are Python or data, under a version of its own.

    \b
      patchkit repack vllm==0.33.0
      patchkit repack vllm==0.33.0 --native

    Its libraries stay as they are. If vLLM's kernels do not load on the device, nothing is written,
    and only a build from source helps.
    """
    began = time.monotonic()
    request = selection.request()
    check_folder(house)  # before a wheel is fetched and read
    offline = options["offline"]
    with (
        progress() as report,
        find_wheel(
            wheel,
            options["cpu"] or request.target.cpu,
            sha256=options["sha256"],
            offline=offline,
            report=report,
        ) as origin,
    ):
        assembler = None
        if options["native"]:
            bar = report("Fetching the compiler")
            assembler = Assembler(offline=offline, progress=bar)

        is_locked = origin.locked and not request.patches
        repacked = repack_wheel(
            origin,
            request,
            house,
            report=report,
            say=tell,
            assembler=assembler,
            sandboxed=choose_sandbox(locked=is_locked, trusted=trusted),
        )

    seconds = time.monotonic() - began
    verdicts = repacked.outcome.verdicts
    yield {
        **record_fields(repacked, "outcome", "libraries"),
        "libraries": list(map(_library_fields, repacked.libraries)),
        "fixes": list(map(verdict_fields, verdicts)),
        "proofs": repacked.outcome.proofs,
        "seconds": round(seconds, 1),
    }

    upstream = "upstream's" if repacked.source["upstream"] else "not upstream's"
    release = bold(f"{repacked.facts['project']} {repacked.facts['version']}")
    origin_text = f"{repacked.source['file']} ({upstream})"
    yield release + f"  {origin_text}  →  {request.target.title}"
    yield from _library_lines(repacked.libraries)

    applied = [verdict for verdict in verdicts if verdict.state is State.APPLIED]
    yield from verdict_lines(applied, verbose=verbose)
    yield from proof_lines(repacked.outcome.proofs, verbose=verbose)
    yield from map(note, repacked.notes)

    what = f"{repacked.wheel}  {repacked.size / 1e6:.1f} MB, {seconds:.0f} s"
    yield (GOOD if repacked.fresh else "nothing to do, it is there already: ") + what
    yield from install_steps(repacked.wheel)


def _library_fields(library: Judged) -> Fields:
    return {
        **record_fields(library, "known", "loads"),
        "told": library.phrase,
        "required": bool(library.known and library.known.required),
        "fat_binaries": {
            str(load): library.loads[load] for load in sorted(Load, reverse=True)
        },
    }


def _library_lines(libraries: Sequence[Judged]) -> Iterator[str]:
    """Yield a line of names for each use on the device, the worst first."""
    for use in Use:
        names = [
            library.name.partition("/")[2]
            for library in libraries
            if library.use is use
        ]
        if names:
            yield f"{use.value}: {', '.join(names)}"
