"""python -m e2e.emulation WORK_FOLDER [SCENARIO ...]: what each did; status 1 if one failed."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from e2e.emulation.lab import Lab
from e2e.emulation.nodes import NodeError
from e2e.emulation.scenarios import SCENARIOS, UnexpectedError
from e2e.emulation.units import obstacle, units, units_ray
from patchkit.errors import PatchkitError

ALL = {each.__name__: each for each in (*SCENARIOS, units, units_ray)}


def main(work: Path, names: list[str]) -> int:
    """Run them one after the other; every one has its turn, even if another failed."""
    if unknown := set(names) - set(ALL):
        print(f"no such scenario: {', '.join(unknown)}; there are {', '.join(ALL)}")
        return 2
    shutil.rmtree(work / "logs", ignore_errors=True)
    lab, failed = Lab(work), []
    print("| scenario | seconds | outcome |\n|---|--:|---|")
    for name in names or list(ALL):
        if name.startswith("units") and (why := obstacle()):
            print(f"left out: {name}: {why}")
            continue
        began = time.monotonic()
        try:
            outcome = ALL[name](lab)
        except (UnexpectedError, NodeError, PatchkitError) as error:
            failed.append(name)
            outcome = f"FAILED: {error}"
        print(f"| {name} | {time.monotonic() - began:.0f} | {outcome} |", flush=True)
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"\n{os.cpu_count()} cores, load {load}; logs: {work / 'logs'}")
    print(f"failed: {', '.join(failed)}" if failed else "each as it should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
