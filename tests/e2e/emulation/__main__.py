"""python -m emulation WORK_FOLDER [SCENARIO ...]: what each did; exit status 1 if one failed."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from e2e.emulation.lab import Lab
from e2e.emulation.measured import bench
from e2e.emulation.nodes import NodeError
from e2e.emulation.scenarios import SCENARIOS, Outcome, UnexpectedError, single
from e2e.emulation.units import obstacle, units, units_bench, units_ray
from patchkit.errors import PatchkitError

OWN_RUNS = (bench, units, units_ray, units_bench)
ALL = {**SCENARIOS, **{each.__name__: each for each in OWN_RUNS}}
HEAD = """\
| scenario | seconds | LAN, bytes by node | QSFP, bytes by node | outcome |
|---|--:|--:|--:|---|"""


def main(work: Path, names: list[str]) -> int:
    """Run them one after the other; every one has its turn, even if another failed."""
    if unknown := set(names) - set(ALL):
        print(f"no such scenario: {', '.join(unknown)}; there are {', '.join(ALL)}")
        return 2
    names = names or list(ALL)
    booted = [name for name in names if name.startswith("units")]
    if booted and (why := obstacle()):
        print(f"left out: {', '.join(booted)}: {why}\n")
        names = [name for name in names if name not in booted]
    shutil.rmtree(work / "logs", ignore_errors=True)
    lab = Lab(work)
    print(HEAD)
    failed = [name for name in ["single", *names] if not _passes(lab, name)]
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"\n{os.cpu_count()} cores, load {load}; logs: {work / 'logs'}")
    print(f"failed: {', '.join(failed)}" if failed else "each as it should be")
    return 1 if failed else 0


def _passes(lab: Lab, name: str) -> bool:
    begin = time.monotonic()
    try:
        outcome = single(lab) if name == "single" else ALL[name](lab)
    except (UnexpectedError, NodeError, PatchkitError) as error:
        outcome = Outcome("FAILED, see below")
        failure = f"{name}: {error}"
    else:
        failure = ""
    seconds = f"{time.monotonic() - begin:.0f}"
    moved = (", ".join(f"{each:,}" for each in kind) for kind in _columns(outcome))
    print(f"| {' | '.join((name, seconds, *moved, outcome.text))} |")
    if failure:
        print(failure)
    return not failure


def _columns(outcome: Outcome) -> tuple[tuple[int, ...], tuple[int, ...]]:
    lan, qsfp = zip(*outcome.traffic, strict=True) if outcome.traffic else ((), ())
    return lan, qsfp


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
