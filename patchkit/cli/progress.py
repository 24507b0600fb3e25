"""Show the progress of long work on standard error: a redrawn line, or lines now and then."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from patchkit.cli.out import quiet_line, redraw_line, tell

PERIOD = 3.0  # seconds from one line of a pipe to the next, or a hundredth of the time so far
_LONG = 90.0  # seconds that are left: a line names them from then on
_ENOUGH_FOR_RATE = 0.01  # of the total: before that the first bytes are no rate
_REDRAWN = 0.1  # seconds from one state of a terminal's line to the next
_QUIET = 2.0  # seconds without a sign of life in a terminal

Update = Callable[[int, int], None]
"""Takes the amount that is done, and the total: bytes, or the things that a caller counts."""


@contextlib.contextmanager
def progress(
    counted: str = "", clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str], Update]]:
    """Show how much of a task is done, in bytes, or in the things that ``counted`` names."""
    in_terminal = sys.stderr.isatty()
    printing = threading.Lock()  # nodes report side by side

    def report(task: str) -> Update:
        began: float | None = None
        due = 0.0
        if in_terminal:
            with printing:
                redraw_line(task)  # some tasks never report more than that

        def update(done: int, total: int) -> None:
            nonlocal began, due
            now = clock()
            if began is None:
                began = now
                due = now if in_terminal else now + PERIOD
            if done >= total:
                redraw_line("")
            elif now >= due:
                elapsed = now - began
                due = now + (_REDRAWN if in_terminal else max(PERIOD, elapsed / 100))
                line = f"{task}: {_amount(done, total, counted)}"
                with printing:
                    show = redraw_line if in_terminal else tell
                    show(line + _time_left(done, total, elapsed))

        return update

    with _beating(printing) if in_terminal else contextlib.nullcontext():
        try:
            yield report
        finally:
            redraw_line("")


def _amount(done: int, total: int, counted: str) -> str:
    if counted:
        return f"{done} of {total} {counted}"
    return f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"


def _time_left(done: int, total: int, elapsed: float) -> str:
    """Return how long the rest takes; "" if that is short, or cannot be told yet."""
    if done < total * _ENOUGH_FOR_RATE:
        return ""
    seconds = elapsed * (total - done) / done
    return f", about {seconds / 60:.0f} min left" if seconds > _LONG else ""


@contextlib.contextmanager
def _beating(printing: threading.Lock) -> Iterator[None]:
    """Redraw the terminal's line with the time while nothing else is printed."""
    ended = threading.Event()
    began = time.monotonic()

    def beat() -> None:
        line = ""
        while not ended.wait(_QUIET / 2):
            drawn, quiet_seconds = quiet_line()
            # The drawn line may be this very line, of the beat before.
            task = line if drawn.startswith(f"{line}, ") else drawn
            if quiet_seconds >= _QUIET:
                line = task or "at work"
                with printing:
                    redraw_line(f"{line}, {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
