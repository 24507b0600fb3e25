"""Run scenarios: `python -m e2e.lifecycle WORK [--write] [SCENARIO ...]`; status 1 if one failed.

``--write`` puts the table into docs/lifecycle.md: rows of scenarios that were not run stay.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from e2e.emulation.nodes import NodeError
from e2e.emulation.scenarios import UnexpectedError
from e2e.lifecycle import rootfs
from e2e.lifecycle.cluster import LifecycleLab
from e2e.lifecycle.page import FAILURES
from e2e.lifecycle.scenarios import SCENARIOS
from patchkit.errors import PatchkitError


@dataclass(frozen=True, kw_only=True)
class ScenarioResult:
    """``outcome`` is what came of it; ``failure`` what went wrong, "" for nothing."""

    name: str
    seconds: float
    outcome: str
    failure: str = ""

    @property
    def row(self) -> tuple[str, ...]:
        what = " ".join((SCENARIOS[self.name].__doc__ or "").split())
        return (f"`{self.name}`", what, f"{self.seconds:.0f}", self.outcome)


def main(words: Sequence[str]) -> int:
    """Run them, some side by side; every one has its turn, even if another failed."""
    parser = argparse.ArgumentParser(prog="nox -s lifecycle --")
    parser.add_argument("work", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--jobs", type=int, default=2, help="scenarios side by side")
    # Real vLLM compiles while it runs: g++,python3-dev.
    parser.add_argument("--with", dest="packages", default="", metavar="PACKAGE,...")
    parser.add_argument("scenario", nargs="*")
    given = parser.parse_intermixed_args(words)
    if unknown := sorted(set(given.scenario) - set(SCENARIOS)):
        parser.error(f"no such scenario: {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    names = given.scenario or list(SCENARIOS)
    work = given.work.resolve()
    lab = LifecycleLab(work, rootfs.ready(work, [*filter(None, given.packages.split(","))]))
    print(FAILURES.head, end="")
    began = time.monotonic()
    with ThreadPoolExecutor(given.jobs) as pool:
        results = [_shown(each) for each in pool.map(lambda name: _result(lab, name), names)]
    minutes = (time.monotonic() - began) / 60
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"\n{minutes:.1f} minutes, {os.cpu_count()} cores, load {load}")
    print(f"logs: {work / 'logs'}")
    failed = [each.name for each in results if each.failure]
    print(f"failed: {', '.join(failed)}" if failed else "each as it should be")
    if given.write and not failed:
        FAILURES.write([each.row for each in results], list(SCENARIOS))
    return 1 if failed else 0


def _result(lab: LifecycleLab, name: str) -> ScenarioResult:
    began = time.monotonic()
    outcome, failure = "FAILED, see below", ""
    try:
        outcome = SCENARIOS[name](lab)
    except (UnexpectedError, NodeError, PatchkitError) as error:
        failure = f"{name}: {error}"
    seconds = time.monotonic() - began
    return ScenarioResult(name=name, seconds=seconds, outcome=outcome, failure=failure)


def _shown(result: ScenarioResult) -> ScenarioResult:
    print(FAILURES.line(result.row), end="")
    if result.failure:
        print(result.failure)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
