"""Run what takes too long for each change, one part after the other, and say how each ended.

    nox -s nightly -- [PART ...]

A part is a session of nox. One that fails stops no other; one that nox skips, such as for want of a
program, did not run, and is never reported as passed. Exit code: 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

NOXFILE = Path(__file__).parents[1] / "noxfile.py"
PARTS = ("matrix", "torture", "doctor-proof", "cross-proof", "lifecycle")
PASSED, FAILED, NOT_RUN = "passed", "FAILED", "NOT RUN"
RESULTS = {"success": PASSED, "skipped": NOT_RUN}
HEADER = ("part", "result", "seconds", "reason")
_LONGEST_REASON = 200


@dataclass(frozen=True)
class Outcome:
    """How a part ended; ``reason`` is empty for one that passed."""

    part: str
    result: str
    seconds: int
    reason: str


def run_part(part: str, noxfile: Path) -> Outcome:
    """Run a session of nox, and show what it prints as it comes."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        nox = [sys.executable, "-m", "nox", "--noxfile", str(noxfile), "--report", str(report)]
        told = _run_shown([*nox, "--session", part])
        result, reason = _read_report(report)
    seconds = round(time.monotonic() - began)
    if result == FAILED:
        reason = reason or told
    return Outcome(part, result, seconds, reason[:_LONGEST_REASON])


def _run_shown(command: list[str]) -> str:
    """Run a command, hand its lines on, and return the last one that tells of an error.

    Without one it is the last line that nox did not write itself.
    """
    told = "it printed nothing"
    is_error = False
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as running:
        assert running.stdout
        for raw in running.stdout:
            line = raw.decode(errors="replace")
            sys.stdout.write(line)
            sys.stdout.flush()
            begins_error = line.startswith(("error: ", "FAILED ", "E   "))
            if begins_error or (line.strip() and not is_error and not line.startswith("nox > ")):
                told = line.strip()
            is_error = is_error or begins_error
    return told


def _read_report(report: Path) -> tuple[str, str]:
    """Return the result that nox reports of its one session, and the reason that it gives."""
    if not report.is_file():
        return FAILED, "nox ended without a report"
    (session,) = json.loads(report.read_text(encoding="utf-8"))["sessions"]
    return RESULTS.get(session["result"], FAILED), session.get("reason") or ""


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a table of Markdown."""
    cells = [[str(cell).replace("|", r"\|") for cell in astuple(outcome)] for outcome in outcomes]
    rows = [HEADER, ["---"] * len(HEADER), *cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def run_parts(parts: Sequence[str], noxfile: Path = NOXFILE) -> int:
    """Run parts one after the other and print how each ended; return the exit code."""
    outcomes: list[Outcome] = []
    try:
        outcomes.extend(run_part(part, noxfile) for part in parts)
    finally:  # an interrupt leaves the table of those that ended
        print(f"\n{table(outcomes)}")
    return int(any(outcome.result == FAILED for outcome in outcomes))


def main() -> int:
    """Run the parts that are named, or all; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parts = parser.parse_args().parts or PARTS
    if unknown := sorted({*parts} - {*PARTS}):
        parser.error(f"{', '.join(unknown)}: no such part; there are {', '.join(PARTS)}")
    return run_parts(parts)


if __name__ == "__main__":
    sys.exit(main())
