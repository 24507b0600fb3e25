"""Share what `build nccl`, `build vllm` and `repack` have in common: options, and the report."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from patchkit.cli.next_step import next_step, pip
from patchkit.cli.options import Renamed
from patchkit.cli.out import Shown, record_fields, style, tell
from patchkit.cli.render import GOOD, Block, ExitCode, Record, finding_blocks, lead_word
from patchkit.finding import worst
from patchkit.target import targets
from patchkit.wheel.build.machine import BuildPlan, Jobs, jobs_for
from patchkit.wheel.build.make import BuiltWheel
from patchkit.wheel.build.toolchain import MACHINES, Toolchain
from patchkit.wheel.file.name import ANY, wheel_name
from patchkit.wheel.wheelhouse.contents import add_wheel

F = TypeVar("F", bound=Callable[..., Any])

jobs_option = click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Compilers at once.  [default: what cores and memory allow]",
)
fresh_option = click.option(
    "--fresh", is_flag=True, help="Begin anew instead of resuming an interrupted build."
)
house_option = click.option(
    "--dir",
    "house",
    type=click.Path(path_type=Path),
    default=Path("wheelhouse"),
    show_default=True,
    help="The wheelhouse to put the wheel into.",
)


dry_run_option = click.option(
    "--dry-run",
    is_flag=True,
    help="Only say what would be compiled, and all that is missing.",
)


def plan_blocks(plan: BuildPlan, jobs: Jobs) -> Iterator[Block]:
    """Yield a plan, and the exit code of what is missing."""
    yield Record({"dry_run": True, **record_fields(plan), "jobs": jobs.number})
    yield style(plan.title, bold=True) + f", with {jobs.number} jobs ({jobs.reason})"
    yield from plan.compiles
    yield from finding_blocks(plan.missing)
    yield "dry run: nothing was compiled" if plan.missing else GOOD + "it could start"
    yield ExitCode(worst(plan.missing))


def cpu_option(default: str, *former: str) -> Callable[[F], F]:
    """Make --cpu; ``former`` are its spellings until the next release."""
    return click.option(
        "--cpu",
        cls=Renamed,
        former=former,
        type=click.Choice(MACHINES),
        help=f"The CPU to make it for.  [default: {default}]",
    )


def chosen_jobs(asked: int | None, memory: int) -> Jobs:
    """Return the number asked for, or what cores and memory allow."""
    return Jobs(asked, "as asked for") if asked else jobs_for(memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A wheel in the wheelhouse, and how long all of it took, in seconds."""

    wheel: Path
    built: BuiltWheel
    seconds: float

    @property
    def line(self) -> str:
        return f"{self.wheel}  {self.wheel.stat().st_size / 1e6:.1f} MB, {self.seconds:.0f} s"

    def fields(self) -> dict[str, Any]:
        """Return the report as JSON has it."""
        return {
            "wheel": str(self.wheel),
            "facts": dict(self.built.facts),
            "log": str(self.built.log),
            "seconds": round(self.seconds, 1),
        }


def place_wheel(built: BuiltWheel, house: Path, began: float) -> Placed:
    """Put what was built into the wheelhouse."""
    wheel = add_wheel(house, built.wheel, built.facts, say=tell)
    return Placed(wheel=wheel, built=built, seconds=time.monotonic() - began)


def compilers(tools: Toolchain) -> str:
    return f"nvcc {tools.cuda}{' (locked)' if tools.locked else ''}, {tools.compiler}"


def built_lines(
    title: str,
    lines: Iterable[str],
    notes: Iterable[str],
    placed: Placed,
    options: Sequence[str] = (),
) -> Iterator[str]:
    """Yield a title, what was proved, notes, and the next command, with more ``options`` of pip."""
    yield title
    yield from (GOOD + line for line in (*lines, placed.line))
    yield from notes
    yield from installing(placed.wheel, placed.built.facts, options)


def installing(
    wheel: Path, facts: Mapping[str, Any], options: Sequence[str] = ()
) -> Sequence[Shown]:
    """Return what installs a wheel that was made for a target."""
    cpus = wheel_name(wheel.name).cpus
    if ANY in cpus or platform.machine() in cpus:
        return [next_step(*pip(), "install", *options, wheel)]
    target = targets().get(str(facts.get("target")))
    device = f"{target.title if target else 'node'}, {' or '.join(sorted(cpus))}"
    words = ["pip", "install", *options, wheel.name]
    return [
        next_step("rsync", "-P", wheel, "USER@HOST:", where=f"to take it to the {device}"),
        next_step(*words, where="there, in vLLM's environment"),
    ]


def reduced(is_reduced: object) -> list[Shown]:
    """Return the note for a build of some parts alone."""
    return [lead_word("note") + "reduced: for tests, not for use"] if is_reduced else []
