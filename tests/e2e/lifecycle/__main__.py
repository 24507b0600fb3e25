"""Run scenarios: `python -m e2e.lifecycle WORK [--write] [SCENARIO ...]`; status 1 if one failed.

``--write`` puts the table into docs/lifecycle.md: rows of scenarios that were not run stay.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from e2e.emulation.nodes import NodeError
from e2e.emulation.scenarios import UnexpectedError
from e2e.lifecycle import rootfs
from e2e.lifecycle.cluster import LifecycleLab
from e2e.lifecycle.page import FAILURES, PageTable
from e2e.lifecycle.scenarios import SCENARIOS, Scenario
from patchkit.errors import PatchkitError

Row = Callable[[LifecycleLab], tuple[str, ...]]


def run_all(
    words: Sequence[str], page: PageTable, known: Mapping[str, Row], packages: Sequence[str] = ()
) -> int:
    """Run some, side by side, and print their rows; every one has its turn, even if one failed."""
    parser = argparse.ArgumentParser(prog=page.maker.removesuffix(" --write"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--jobs", type=int, default=2, help="how many side by side")
    # Real vLLM compiles while it runs: g++,python3-dev.
    parser.add_argument("--with", dest="packages", default="", metavar="PACKAGE,...")
    parser.add_argument("name", nargs="*")
    given = parser.parse_intermixed_args(words)
    if unknown := sorted(set(given.name) - set(known)):
        parser.error(f"not known: {', '.join(unknown)}; there are {', '.join(known)}")
    work = given.work.resolve()
    more = filter(None, given.packages.split(","))
    lab = LifecycleLab(work, rootfs.ready(work, [*packages, *more]))
    rows: list[tuple[str, ...]] = []
    failed: list[str] = []

    def run_one(name: str) -> None:
        try:
            row = known[name](lab)
            rows.append(row)
            print(page.line(row), end="", flush=True)
        except (UnexpectedError, NodeError, PatchkitError, AssertionError) as error:
            failed.append(name)
            print(f"{name}: FAILED: {error}", flush=True)

    print(page.head, end="")
    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(run_one, given.name or known))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{os.cpu_count()} cores, load {load}; logs: {work / 'logs'}")
    print(f"failed: {', '.join(failed)}" if failed else "each as it should be")
    if given.write and not failed:
        page.write(rows, list(known))
    return 1 if failed else 0


def timed(scenario: Scenario) -> Row:
    """Return what runs a scenario, and describes it."""

    def run(lab: LifecycleLab) -> tuple[str, ...]:
        began, what = time.monotonic(), " ".join((scenario.__doc__ or "").split())
        outcome = scenario(lab)
        return (f"`{scenario.__name__}`", what, f"{time.monotonic() - began:.0f}", outcome)

    return run


if __name__ == "__main__":
    made = {name: timed(scenario) for name, scenario in SCENARIOS.items()}
    sys.exit(run_all(sys.argv[1:], FAILURES, made))
