"""Share what `build nccl`, `build vllm` and `repack` have in common: options, and the report."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from patchkit.cli.options import offline_option
from patchkit.cli.out import PATH, Shown, next_step, pip, record_fields, style, tell
from patchkit.cli.render import (
    GOOD,
    Block,
    ExitCode,
    Record,
    finding_blocks,
    lead_word,
    with_options,
)
from patchkit.finding import worst
from patchkit.target import targets
from patchkit.wheel.build.machine import BuildPlan, Jobs
from patchkit.wheel.build.make import BuiltWheel
from patchkit.wheel.build.toolchain import MACHINES, Toolchain
from patchkit.wheel.file.wheelfile import ANY, wheel_name
from patchkit.wheel.wheelhouse.contents import add_wheel, load_manifest

cpu_option = click.option(
    "--cpu", type=click.Choice(MACHINES), help="Default: the target's."
)
house_option = click.option(
    "--dir", "house", type=PATH, default="wheelhouse", show_default=True
)
build_options = with_options(
    cpu_option,
    click.option(
        "--jobs", type=click.IntRange(min=1), metavar="N", help="Compilers at once."
    ),
    click.option("--fresh", is_flag=True, help="Do not resume an interrupted build."),
    offline_option,
    house_option,
    click.option(
        "--dry-run", is_flag=True, help="Say what would be done, and what is missing."
    ),
)


def plan_blocks(plan: BuildPlan, jobs: Jobs) -> Iterator[Block]:
    """Yield a plan, and the exit code of what is missing."""
    yield Record({"dry_run": True, **record_fields(plan), "jobs": jobs.number})
    yield style(plan.title, bold=True) + f", with {jobs.number} jobs ({jobs.reason})"
    yield from finding_blocks(plan.missing)
    obstacle = worst(plan.missing)
    yield "dry run: nothing was compiled" if obstacle else GOOD + "it could start"
    yield ExitCode(obstacle)


def built_blocks(
    built: BuiltWheel,
    house: Path,
    began: float,
    what: tuple[str, str],
    tools: Toolchain,
    lines: Iterable[str],
    *,
    reduced: bool,
    notes: Iterable[str] = (),
    **more: object,
) -> Iterator[Block]:
    """Put a wheel into the wheelhouse; yield what was proved, notes, and what comes next.

    ``what`` is the release, and what it was built for; ``more`` belongs to the record.
    """
    wheel = add_wheel(house, built.wheel, built.facts, say=tell)
    seconds = time.monotonic() - began
    known = {
        "wheel": wheel,
        "facts": built.facts,
        "log": built.log,
        "seconds": round(seconds, 1),
    }
    yield Record(known | more)
    across = f" on {platform.machine()}" if platform.machine() != tools.machine else ""
    yield style(what[0], bold=True) + f"  →  {what[1]}, {tools.machine}{across}"
    placed = f"{wheel}  {wheel.stat().st_size / 1e6:.1f} MB, {seconds:.0f} s"
    for line in (f"nvcc {tools.cuda}, {tools.compiler}", *lines, placed):
        yield GOOD + line
    if reduced:
        yield lead_word("note") + "reduced: for tests, not for use"
    yield from notes
    # The folder may not have been there before the wheel was.
    taken = {override.takes.project for override in load_manifest(house).overrides}
    overrides = wheel_name(wheel.name).project in taken
    yield from install_steps(wheel, built.facts, ["--no-deps"] if overrides else [])


def install_steps(
    wheel: Path, facts: Mapping[str, Any], options: Sequence[str] = ()
) -> Sequence[Shown]:
    """Return what installs a wheel that was made for a target: here, or how it gets there."""
    cpus = wheel_name(wheel.name).cpus
    if ANY in cpus or platform.machine() in cpus:
        return [next_step(*pip(), "install", *options, wheel)]
    target = targets().get(str(facts.get("target")))
    device = f"{target.title if target else 'node'}, {' or '.join(sorted(cpus))}"
    words = ["pip", "install", *options, wheel.name]
    return [
        next_step(
            "rsync", "-P", wheel, "USER@HOST:", where=f"to take it to the {device}"
        ),
        next_step(*words, where="there, in vLLM's environment"),
    ]
