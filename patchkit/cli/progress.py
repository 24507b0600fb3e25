"""Tell on standard error how far long work is: a line that is redrawn, or one now and then."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from patchkit.cli.out import quiet_line, redraw_line, tell

PERIOD = 3.0  # seconds from one line of a pipe to the next, or a hundredth of the time so far
_LONG = 90.0  # seconds that are left: from then on it is said
_TOLD = 0.01  # of all there is to do: before that the first bytes are no rate
_REDRAWN = 0.1  # seconds from one state of a terminal's line to the next
_QUIET = 2.0  # seconds without a sign of life in a terminal

Update = Callable[[int, int], None]
"""Takes what is done, and all there is to do: bytes, or what a caller counts."""


@contextlib.contextmanager
def progress(
    counted: str = "", clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str], Update]]:
    """Show how much of a task is done: of bytes, or of what ``counted`` names."""
    in_terminal = sys.stderr.isatty()
    printing = threading.Lock()  # nodes report side by side

    def report(task: str) -> Update:
        began: float | None = None
        due = 0.0
        if in_terminal:
            with printing:
                redraw_line(task)  # of some that is all there is to see

        def update(done: int, total: int) -> None:
            nonlocal began, due
            now = clock()
            if began is None:
                began, due = now, now + (0 if in_terminal else PERIOD)
            if done >= total:
                redraw_line("")
            elif now >= due:
                due = now + (
                    _REDRAWN if in_terminal else max(PERIOD, (now - began) / 100)
                )
                amount = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
                line = (
                    f"{task}: {f'{done} of {total} {counted}' if counted else amount}"
                )
                left = (
                    (now - began) * (total - done) / done
                    if done >= total * _TOLD
                    else 0.0
                )
                if left > _LONG:
                    line += f", about {left / 60:.0f} min left"
                with printing:
                    (redraw_line if in_terminal else tell)(line)

        return update

    with _beating(printing) if in_terminal else contextlib.nullcontext():
        try:
            yield report
        finally:
            redraw_line("")


@contextlib.contextmanager
def _beating(printing: threading.Lock) -> Iterator[None]:
    """Redraw the terminal's line with the time where nothing else is printed for some seconds."""
    ended, began = threading.Event(), time.monotonic()

    def beat() -> None:
        line = ""
        while not ended.wait(_QUIET / 2):
            drawn, quiet = quiet_line()
            # What stands there may be this very line, a beat ago.
            task = line if drawn.startswith(f"{line}, ") else drawn
            if quiet >= _QUIET:
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
