"""Read the blocks of a page as commands; say what of README's runs on a machine that is no Spark.

A step runs as the page has it, or with a stand-in: options that name a machine of the tests, for a
device that is not there. What needs the GPU, the other machine or a wheel of another CPU does not
run, and the reason is printed in its place.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
ONE, TWO, BY_HAND = "One Spark", "Two Sparks", "Both by hand"
BARE = "ipv6_only"  # of tests/support/hosts.py: a machine without addresses
_BLOCK = r"^## {}\n(?:(?!^## ).*\n)*?```bash\n((?:.+\n|\n)*?)```$"
_RELEASE = re.compile(r"patchkit repack vllm==(\S+)")
_TESTS = re.compile(r"^.venv/bin/pip install nox && .*$", re.MULTILINE)

# Machines of tests/support/hosts.py: one Spark, and two that are cabled at different cages, before
# and after `net plan`. By what README calls them, with their number.
MACHINES = {
    "": ("single", 0),
    "spark-1": ("cable_port0", 0),
    "spark-2": ("cable_port1", 1),
}

_STAND_INS = {
    # One folder stands for both machines, so each replaces the file of the other.
    r"(patchkit net plan)": r"\1 --force --root {bare}",
    r"sudo install (.*) /etc/netplan/ && .*": r"install -D \1 {bare}/etc/netplan/40-patchkit.yaml",
    r"(patchkit env)": r"\1 --root {root} --vllm {release}",
    # 4 GB of torch and CUDA are locked, not downloaded. An index that has not all of it yet is no
    # fault of the line: what it lacks is shown.
    r"(.* && patchkit wheelhouse fill)": (
        r"{{ \1 --lock-only 2>fill.said || {{ cat fill.said && "
        r"grep -q 'is available and' fill.said && echo 'SKIPPED: the index lacks that'; }}; }}"
    ),
    r'eval "\$\((patchkit serve-args) (.*)\)"(?: &)?': r"\1 --root {root} --vllm {release} \2",
}
_SKIPPED = {
    r"sudo apt ": "the machine came with what README takes from the distribution",
    r"pip install \./wheelhouse/": "the wheel is for aarch64, and brings torch and CUDA",
    r"patchkit (cluster|up) ": "it takes nodes with systemd: nox -s lifecycle -- newcomer runs it",
    r"patchkit net verify": "there is no other machine to ask",
    r"scp ": "one folder stands for both machines",
    r"(until )?curl ": "no server runs: that takes the GPU",
}


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


def block(page: Path, title: str) -> str:
    """Return the block below a heading, as it is pasted."""
    text = page.read_text(encoding="utf-8")
    (text,) = re.findall(_BLOCK.format(re.escape(title)), text, re.MULTILINE)
    return str(text)


def commands(page: Path, title: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of the block below a heading, each with the machine that it is for.

    A comment at the beginning of a line names that; "" before any.
    """
    machine = ""
    for line in block(page, title).replace("\\\n", " ").splitlines():
        if named := re.match(r"# ([\w-]+)", line):
            machine = named[1]
        elif line:
            # Who pastes the block runs the next line only if this one went well; so does sh -e.
            yield machine, " ".join(line.removesuffix("&&").split())


def release() -> str:
    """Return the release of vLLM that README takes."""
    (named,) = set(_RELEASE.findall(README.read_text(encoding="utf-8")))
    return str(named)


def tests_command() -> str:
    """Return the line with which README says that the tests are run."""
    (line,) = _TESTS.findall(README.read_text(encoding="utf-8"))
    return str(line)


def steps(title: str, machines: Path) -> Iterator[Step]:
    """Yield the steps of the block below a heading; ``machines`` is the folder of stand-ins."""
    page = README.parent / "docs" / "by-hand.md" if title == BY_HAND else README
    for machine, text in commands(page, title):
        name, number = MACHINES[machine]
        root, bare = machines / f"{name}-{number}", machines / f"{BARE}-{number}"
        here = {"root": root, "bare": bare, "release": release()}
        left_out = [why for pattern, why in _SKIPPED.items() if re.match(pattern, text)]
        runs = "" if left_out else text
        for pattern, stand_in in _STAND_INS.items():
            runs = re.sub(rf"^{pattern}", stand_in.format(**here), runs)
        why = left_out[0] if left_out else f"here: {runs}" if runs != text else ""
        yield Step(machine=machine, text=text, runs=runs, why=why)


def script(title: str, machines: Path) -> str:
    """Return a block as a script for sh, which shows each step, or why it is left out."""
    lines = []
    for step in steps(title, machines):
        left_out = "" if step.runs else "SKIPPED: "
        said = [f"  {left_out}{step.why}"] if step.why else []
        shown = [f"{step.machine}$ {step.text}", *said]
        lines += [f"printf '%s\\n' {shlex.join(shown)}", step.runs or ":"]
    return "\n".join(lines)
