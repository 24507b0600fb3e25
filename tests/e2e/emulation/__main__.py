"""python -m e2e.emulation WORK_FOLDER [SCENARIO ...]: what each did; status 1 if one failed."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from e2e.emulation.lab import SCENARIOS, Lab
from e2e.emulation.units import obstacle, soak, units, units_podman
from e2e.lifecycle.__main__ import make_rows

UNITS = (units, units_podman)
DEFAULT = {each.__name__: each for each in (*SCENARIOS, *UNITS)}
ALL = {**DEFAULT, "soak": soak}  # which takes an hour


def main(work: Path, names: list[str]) -> int:
    """Run them one after the other."""
    if unknown := set(names) - set(ALL):
        print(f"no such scenario: {', '.join(unknown)}; there are {', '.join(ALL)}")
        return 2
    shutil.rmtree(work / "logs", ignore_errors=True)
    chosen = [ALL[name] for name in names or DEFAULT]
    if (why := obstacle()) and set(chosen) & set(UNITS):
        print(f"left out: {', '.join(each.__name__ for each in UNITS)}: {why}")
        chosen = [each for each in chosen if each not in UNITS]
    lab = Lab(work)
    makers = {each.__name__: partial(_row, each, lab) for each in chosen}
    rows = make_rows(
        ("scenario", "s", "outcome"), makers, work / "logs", side_by_side=1
    )
    return 0 if set(rows) == set(makers) else 1


def _row(scenario: Callable[[Lab], str], lab: Lab) -> tuple[str, ...]:
    began = time.monotonic()
    outcome = scenario(lab)
    return (f"`{scenario.__name__}`", f"{time.monotonic() - began:.0f}", outcome)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
