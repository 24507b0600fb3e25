"""Share the options and the report of `build nccl`, `build vllm` and `repack`."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from patchkit.cli.options import offline_option
from patchkit.cli.out import (
    GOOD,
    PATH,
    Blocks,
    ExitCode,
    Record,
    Shown,
    bold,
    finding_blocks,
    flag,
    next_step,
    note,
    option,
    pip,
    record_fields,
    tell,
    with_options,
)
from patchkit.finding import worst
from patchkit.target import targets
from patchkit.wheel.build.machine import BuildPlan, Jobs
from patchkit.wheel.build.make import BuiltWheel
from patchkit.wheel.build.toolchain import MACHINES, Toolchain
from patchkit.wheel.file.wheelfile import ANY, wheel_name
from patchkit.wheel.wheelhouse.contents import add_wheel, load_manifest

cpu_option = option("--cpu", "CPU; default: the target's.", type=click.Choice(MACHINES))
house_option = option(
    "--dir",
    "house",
    "Folder of wheels.",
    type=PATH,
    default="wheelhouse",
    show_default=True,
)
build_options = with_options(
    cpu_option,
    option("--jobs N", "Compilers at once.", type=click.IntRange(min=1)),
    flag("--fresh", "Do not resume an interrupted build."),
    offline_option,
    house_option,
    flag("--dry-run", "Say what would be done, and what is missing."),
)


def plan_blocks(plan: BuildPlan, jobs: Jobs) -> Blocks:
    """Yield a plan, and the exit code for missing tools."""
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
    tools: Toolchain,
    *,
    title: str,
    device: str,
    checks: Sequence[str],
    notes: Sequence[str],
    reduced: bool,
    **fields: object,
) -> Blocks:
    """Put a wheel into the wheelhouse; yield the report of its build, and the next steps.

    ``began`` is the start by ``time.monotonic``. ``checks`` are lines about proofs, ``notes`` lines
    to heed; a ``reduced`` wheel is for tests. ``fields`` belong to the record as well.
    """
    wheel = add_wheel(house, built.wheel, built.facts, say=tell)
    seconds = time.monotonic() - began
    yield Record(
        {
            "wheel": wheel,
            "facts": built.facts,
            "log": built.log,
            "seconds": round(seconds, 1),
            **fields,
        }
    )

    machine = tools.machine
    if platform.machine() != machine:
        machine += f" on {platform.machine()}"

    yield bold(title) + f"  →  {device}, {machine}"
    yield GOOD + f"nvcc {tools.cuda}, {tools.compiler}"
    yield from (GOOD + check for check in checks)
    yield GOOD + f"{wheel}  {wheel.stat().st_size / 1e6:.1f} MB, {seconds:.0f} s"
    if reduced:
        yield note("reduced: for tests, not for use")

    yield from notes

    # The folder may not have been there before the wheel was.
    overridden = {row.takes.project for row in load_manifest(house).overrides}
    is_overridden = wheel_name(wheel.name).project in overridden
    options = ["--no-deps"] if is_overridden else []
    yield from install_steps(wheel, built.facts, options)


def install_steps(
    wheel: Path, facts: Mapping[str, Any], options: Sequence[str] = ()
) -> Sequence[Shown]:
    """Return the commands that install a wheel: here, or that take it to its device."""
    cpus = wheel_name(wheel.name).cpus
    if ANY in cpus or platform.machine() in cpus:
        return [next_step(*pip(), "install", *options, wheel)]

    target = targets().get(str(facts.get("target")))
    device = target.title if target else "node"
    where = f"to take it to the {device}, {' or '.join(sorted(cpus))}"
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
