"""Say what of README's blocks runs on a machine that is no Spark, and what stands for the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from e2e.proofs.steps import Page, Step

README = Path(__file__).parents[3] / "README.md"
ONE, TWO, BY_HAND = "One Spark", "Two Sparks", "Both by hand"
_RELEASE = re.compile(r"patchkit repack vllm==(\S+)")
_TESTS = re.compile(r"^.venv/bin/pip install nox && .*$", re.MULTILINE)

# Machines of tests/support/hosts.py: one Spark, and two that are cabled at different cages, before
# and after `net apply`. By what README calls them, with their number.
MACHINES = {"": ("single", 0), "spark-1": ("cable_port0", 0), "spark-2": ("cable_port1", 1)}

_STAND_INS = {
    r"sudo (\S*patchkit net apply)": r"\1 --yes --root {bare}",
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


def _page(title: str) -> Page:
    return Page(
        path=README.parent / "docs" / "by-hand.md" if title == BY_HAND else README,
        machines=MACHINES,
        skipped=_SKIPPED,
        stand_ins=_STAND_INS,
        values={"release": release()},
    )


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
    return _page(title).steps(title, machines)


def script(title: str, machines: Path) -> str:
    """Return a block as a script for sh, which shows each step, or why it is left out."""
    return _page(title).script(title, machines)
