"""Read the blocks of a page as steps, and say what of them runs on a machine that is no Spark.

A step runs as the page has it, or with a stand-in: options that name a machine of the tests, for a
device that is not there. What needs the GPU, the other machine or a wheel of another CPU does not
run, and the reason is printed in its place.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = r"^## {}\n(?:(?!^## ).*\n)*?```\n((?:.+\n|\n)*?)```$"
_MACHINE = re.compile(r"# ([\w-]+)")
BARE = "ipv6_only"  # of tests/support/hosts.py: a machine before `net apply`


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command line of a page, on one machine.

    ``runs`` is what stands for it here, empty if nothing does; ``why`` says so in words, and is
    empty for what runs as it is.
    """

    machine: str
    text: str
    runs: str
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page of commands.

    ``machines`` maps what the page calls a machine in a comment to one of tests/support/hosts.py
    and its number, "" being the one that no comment names. ``skipped`` maps patterns of commands to
    the reason why they do not run here, ``stand_ins`` to what runs in their place, with {machine},
    {root}, {bare} and the names of ``values``.
    """

    path: Path
    machines: Mapping[str, tuple[str, int]]
    skipped: Mapping[str, str]
    stand_ins: Mapping[str, str]
    values: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def steps(self, title: str, folder: Path) -> Iterator[Step]:
        """Yield the steps of the block below a heading; ``folder`` has the machines' stand-ins."""
        (block,) = re.findall(_BLOCK.format(re.escape(title)), self.text(), re.MULTILINE)
        machine = ""
        for line in block.replace("\\\n", " ").splitlines():
            if named := _MACHINE.match(line):
                machine = named[1]
            elif line:
                yield self._step(" ".join(line.split()), machine, folder)

    def _step(self, text: str, machine: str, folder: Path) -> Step:
        for pattern, why in self.skipped.items():
            if re.match(pattern, text):
                return Step(machine=machine, text=text, runs="", why=why)
        name, number = self.machines[machine]
        here = {
            "machine": machine,
            "root": folder / f"{name}-{number}",
            "bare": folder / f"{BARE}-{number}",
        }
        for pattern, stand_in in self.stand_ins.items():
            if re.match(pattern, text):
                runs = re.sub(rf"^{pattern}", stand_in.format(**here, **self.values), text)
                return Step(machine=machine, text=text, runs=runs, why=f"here: {runs}")
        return Step(machine=machine, text=text, runs=text)

    def script(self, title: str, folder: Path) -> str:
        """Return a block as a script for sh, which shows each step, or why it is left out."""
        lines = []
        for step in self.steps(title, folder):
            left_out = "" if step.runs else "SKIPPED: "
            said = [f"  {left_out}{step.why}"] if step.why else []
            shown = [f"{step.machine}$ {step.text}", *said]
            lines += [f"printf '%s\\n' {shlex.join(shown)}", step.runs or ":"]
        return "\n".join(lines)
