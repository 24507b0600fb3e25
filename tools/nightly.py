"""Run what takes too long for each change, one part after the other, and say how each ended.

    nox -s nightly -- [PART ...]

A part is a session of nox. One that fails, or takes too long, stops no other. A part that nox
skips, for example because a program is missing, is reported as NOT RUN. Exit code: 1 if a part
failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

NOXFILE = Path(__file__).parents[1] / "noxfile.py"
PARTS = (
    "matrix",
    "torture",
    "doctor-proof",
    "cross-proof",
    "lifecycle",
    "memory-storms",
    "answers-proof",
)
PASSED, FAILED, NOT_RUN = "passed", "FAILED", "NOT RUN"
RESULTS = {"success": PASSED, "skipped": NOT_RUN}
HEADER = ("part", "result", "seconds", "reason")
_LONGEST_REASON = 200
LIMIT = (
    "5h"  # of a part, as `timeout` takes it; less than a job of nightly.yml may take
)
_LATE = (124, -signal.SIGKILL)  # how `timeout` ends if a part does not end in time


@dataclass(frozen=True)
class Outcome:
    """How a part ended; ``reason`` is empty for one that passed."""

    part: str
    result: str
    seconds: int
    reason: str


def run_part(part: str, noxfile: Path, limit: str = LIMIT) -> Outcome:
    """Run a session of nox, and show what it prints as it comes; end it after a time."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        nox = [
            sys.executable,
            "-m",
            "nox",
            "--noxfile",
            str(noxfile),
            "--report",
            str(report),
        ]
        # `timeout` ends all processes of the part, and not nox alone.
        within = ["timeout", "--kill-after=5m", limit]
        status, last_error_line = _run_shown([*within, *nox, "--session", part])
        result, reason = _read_report(report)
    seconds = round(time.monotonic() - began)
    if status in _LATE:
        result = FAILED
        reason = f"took more than {limit}"
    if result == FAILED:
        reason = reason or last_error_line
    return Outcome(part, result, seconds, reason[:_LONGEST_REASON])


def _run_shown(command: list[str]) -> tuple[int, str]:
    """Run a command, hand its lines on, and return its status and the last line with an error.

    Without one it is the last line that nox did not write itself.
    """
    last_line = "it printed nothing"
    last_error_line = ""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,  # a part in the background would stop at a terminal
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as running:
        try:
            for line in _shown_lines(running):
                if line.startswith(("error: ", "FAILED ", "E   ")):
                    last_error_line = line.strip()
                elif line.strip() and not line.startswith("nox > "):
                    last_line = line.strip()
        except BaseException:
            # An interrupt does not reach the part's group of processes by itself.
            running.terminate()
            raise
    return running.returncode, last_error_line or last_line


def _shown_lines(running: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield the lines of a program as they come, and show each."""
    assert running.stdout
    for raw in running.stdout:
        line = raw.decode(errors="replace")
        sys.stdout.write(line)
        sys.stdout.flush()
        yield line


def _read_report(report: Path) -> tuple[str, str]:
    """Return the result that nox reports of its one session, and the reason that it gives."""
    if not report.is_file():
        return FAILED, "nox ended without a report"
    sessions = json.loads(report.read_text(encoding="utf-8"))["sessions"]
    if len(sessions) != 1:
        return FAILED, f"nox ran {len(sessions)} sessions instead of one"
    session = sessions[0]
    return RESULTS.get(session["result"], FAILED), session.get("reason") or ""


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a table of Markdown."""
    cells = [
        [str(cell).replace("|", r"\|") for cell in astuple(outcome)]
        for outcome in outcomes
    ]
    rows = [HEADER, ["---"] * len(HEADER), *cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def run_parts(parts: Sequence[str], noxfile: Path = NOXFILE, limit: str = LIMIT) -> int:
    """Run parts one after the other and print how each ended; return the exit code."""
    outcomes: list[Outcome] = []
    try:
        outcomes.extend(run_part(part, noxfile, limit) for part in parts)
    finally:  # an interrupt leaves the table of those that ended
        print(f"\n{table(outcomes)}")
    return int(any(outcome.result == FAILED for outcome in outcomes))


def main() -> int:
    """Run the parts that are named, or all; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parts = parser.parse_args().parts or PARTS
    if unknown := sorted({*parts} - {*PARTS}):
        parser.error(
            f"{', '.join(unknown)}: no such part; there are {', '.join(PARTS)}"
        )
    return run_parts(parts)


if __name__ == "__main__":
    sys.exit(main())
