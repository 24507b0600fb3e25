"""Show the progress of long work on standard error: a redrawn line, or lines now and then."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from patchkit.cli.out import quiet_line, redraw_line, tell

# Seconds between two lines in a pipe; a hundredth of the elapsed time if that is more.
PERIOD = 3.0
_LONG = 90.0  # seconds: a line tells the time that is left if it is more
_ENOUGH_FOR_RATE = 0.01  # share of the total that must be done to estimate the rest
_REDRAWN = 0.1  # seconds between two drawings of a terminal's line
_QUIET = 2.0  # seconds without output, after which a terminal's line shows the time

Update = Callable[[int, int], None]
"""A callback that gets the amount done and the total: bytes, or whatever the caller counts."""


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
    """Return a text with the minutes left; "" for a short time, or if it is too early to tell."""
    if done < total * _ENOUGH_FOR_RATE:
        return ""
    seconds = elapsed * (total - done) / done
    return f", about {seconds / 60:.0f} min left" if seconds > _LONG else ""


@contextlib.contextmanager
def _beating(printing: threading.Lock) -> Iterator[None]:
    """Redraw the terminal's line with the elapsed time whenever nothing was printed for a while."""
    ended = threading.Event()
    began = time.monotonic()

    def beat() -> None:
        line = ""
        while not ended.wait(_QUIET / 2):
            drawn, quiet_seconds = quiet_line()
            # The drawn line may be the one of the last beat: then do not add a second time to it.
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
