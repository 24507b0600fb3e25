"""python -m emulation WORK_FOLDER [SCENARIO ...]: a table row for each; exit status 1 if one fails."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console

from emulation.lab import Lab
from emulation.nodes import NodeError
from emulation.scenarios import SCENARIOS, Outcome, Unexpected

CONSOLE = Console(highlight=False, soft_wrap=True)


def main(work: Path, names: list[str]) -> int:
    """Run them one after the other; every one has its turn, even if another failed."""
    if unknown := set(names) - set(SCENARIOS):
        CONSOLE.print(f"no such scenario: {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
        return 2
    lab = Lab(work)
    begin = time.monotonic()
    try:
        text, tokens = lab.expected[0]
    except NodeError as error:
        CONSOLE.print(f"single  FAILED: {error}", markup=False)
        return 1
    CONSOLE.print(f"single  {time.monotonic() - begin:.0f} s  {len(tokens)} tokens: {text[:40]} …")
    failed = [name for name in names or SCENARIOS if not _passes(lab, name)]
    CONSOLE.print(f"failed: {', '.join(failed)}" if failed else "all as they should be")
    return 1 if failed else 0


def _passes(lab: Lab, name: str) -> bool:
    begin = time.monotonic()
    try:
        outcome = SCENARIOS[name](lab)
    except (Unexpected, NodeError) as error:
        CONSOLE.print(f"{name}  {time.monotonic() - begin:.0f} s  FAILED: {error}", markup=False)
        return False
    CONSOLE.print(f"{name}  {time.monotonic() - begin:.0f} s  {_shown(outcome)}", markup=False)
    return True


def _shown(outcome: Outcome) -> str:
    moved = "; ".join(f"LAN {lan:,} QSFP {qsfp:,}" for lan, qsfp in outcome.traffic)
    return f"{outcome.text}  [{moved}]"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
