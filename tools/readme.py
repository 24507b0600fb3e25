"""Read README's blocks as steps, and say what of them runs on a machine that is no Spark.

A step runs as README has it, or with a stand-in: options that name a machine of the tests, for a
device that is not there. What needs the GPU, the other machine or a wheel of another CPU does not
run, and the reason is printed in its place.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
ONE, TWO = "One Spark", "Two Sparks"
_BLOCK = r"^## {}\n(?:(?!^## ).*\n)*?```\n((?:.+\n|\n)*?)```$"
_RELEASE = re.compile(r"patchkit repack vllm==(\S+)")
_TESTS = re.compile(r"^.venv/bin/pip install nox && .*$", re.MULTILINE)
_MACHINE = re.compile(r"# (spark-\d)")

# Machines of tests/support/hosts.py: one Spark, and two that are cabled at different cages, before
# and after `net apply`. By what README calls them, with their number.
MACHINES = {"": ("single", 0), "spark-1": ("cable_port0", 0), "spark-2": ("cable_port1", 1)}
BARE = "ipv6_only"

_STAND_INS = (
    (r"sudo (\S*patchkit net apply)", r"\1 --dry-run --root {bare}"),
    (r"(patchkit env)", r"\1 --root {root} --vllm {release}"),
    (r'eval "\$\((patchkit serve-args) (.*)\)"(?: &)?', r"\1 --root {root} --vllm {release} \2"),
)
_SKIPPED = (
    (r"sudo apt ", "the machine came with what README takes from the distribution"),
    (r"pip install \./wheelhouse/", "the wheel is for aarch64, and brings torch and CUDA"),
    (r"patchkit net verify", "there is no other machine to ask"),
    (r"scp ", "one folder stands for both machines"),
    (r"(until )?curl ", "no server runs: that takes the GPU"),
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command line of README, on one machine.

    ``runs`` is what stands for it here, empty if nothing does; ``why`` says so in words, and is
    empty for what runs as it is.
    """

    machine: str
    text: str
    runs: str
    why: str = ""


def release() -> str:
    """Return the release of vLLM that README takes."""
    (named,) = _RELEASE.findall(README.read_text(encoding="utf-8"))
    return str(named)


def tests_command() -> str:
    """Return the line with which README says that the tests are run."""
    (line,) = _TESTS.findall(README.read_text(encoding="utf-8"))
    return str(line)


def steps(title: str, machines: Path) -> Iterator[Step]:
    """Yield the steps of the block below a heading; ``machines`` is the folder of stand-ins."""
    (block,) = re.findall(_BLOCK.format(title), README.read_text(encoding="utf-8"), re.MULTILINE)
    machine = ""
    for line in block.replace("\\\n", " ").splitlines():
        if named := _MACHINE.match(line):
            machine = named[1]
        elif line:
            yield _step(" ".join(line.split()), machine, machines)


def _step(text: str, machine: str, machines: Path) -> Step:
    for pattern, why in _SKIPPED:
        if re.match(pattern, text):
            return Step(machine=machine, text=text, runs="", why=why)
    name, number = MACHINES[machine]
    roots = {"root": machines / f"{name}-{number}", "bare": machines / f"{BARE}-{number}"}
    for pattern, stand_in in _STAND_INS:
        if re.match(pattern, text):
            options = stand_in.format(release=release(), **roots)
            runs = re.sub(rf"^{pattern}", options, text)
            return Step(machine=machine, text=text, runs=runs, why=f"here: {runs}")
    return Step(machine=machine, text=text, runs=text)


def script(title: str, machines: Path) -> str:
    """Return a block as a script for sh, which shows each step, or why it is left out."""
    lines = []
    for step in steps(title, machines):
        left_out = "" if step.runs else "SKIPPED: "
        shown = [f"{step.machine}$ {step.text}", *([f"  {left_out}{step.why}"] if step.why else [])]
        lines += [f"printf '%s\\n' {shlex.join(shown)}", step.runs or ":"]
    return "\n".join(lines)
