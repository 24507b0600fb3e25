"""Tell on standard error how far long work is: bars in a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from patchkit.cli.alive import unwatched
from patchkit.cli.out import tell
from patchkit.quoting import visible

PERIOD = 10.0  # seconds from one line of a pipe to the next

Update = Callable[[int, int], None]
"""Takes what is done, and all there is to do: bytes, or what a caller counts."""


@contextlib.contextmanager
def progress(
    counted: str = "", clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str], Update]]:
    """Draw progress bars, if standard error is a terminal; rich is imported for the first.

    Else print a line every PERIOD. Of bytes, or of what ``counted`` names.
    """
    with contextlib.ExitStack() as drawn:
        bars: list[Any] = []
        first = threading.Lock()  # nodes report side by side

        def report(task: str) -> Update:
            identifier: Any = None
            in_lines = _in_lines(task, counted, clock)

            def update(done: int, total: int) -> None:
                nonlocal identifier
                with first:
                    if not bars:
                        bars.append(_rich_bars(counted))
                if bars[0] is None or bars[0].disable:
                    in_lines(done, total)
                    return
                with first:
                    if not bars[0].live.is_started:
                        drawn.enter_context(unwatched())
                        drawn.enter_context(bars[0])
                    # At the first step: a task without any draws no bar.
                    if identifier is None:
                        identifier = bars[0].add_task(visible(task), total=total)
                    bars[0].update(identifier, completed=done, total=total)
                    if bars[0].finished:  # a bar that stands still is no sign of life
                        drawn.close()

            return update

        yield report


def _rich_bars(counted: str) -> Any:
    """Return bars of bytes, or of what is counted; without rich, which a node lacks, None.

    Without a terminal they draw nothing.
    """
    try:
        from rich import progress as rich
        from rich.console import Console
    except ModuleNotFoundError:
        return None

    # What is shown is escaped before: no text is markup, and none is obeyed by a terminal.
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    amounts = (
        (rich.MofNCompleteColumn(), rich.TextColumn(visible(counted)))
        if counted
        else (rich.DownloadColumn(), rich.TransferSpeedColumn())
    )
    return rich.Progress(
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        *amounts,
        rich.TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def _in_lines(task: str, counted: str, clock: Callable[[], float]) -> Update:
    due: float | None = None

    def update(done: int, total: int) -> None:
        nonlocal due
        now = clock()
        if due is None:
            due = now + PERIOD
        if now < due or done >= total:
            return
        due = now + PERIOD
        if counted:
            tell(f"{task}: {done} of {total} {counted}")
        else:
            tell(f"{task}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

    return update


def in_tenths(bar: Update, doing: str) -> Update:
    """Return the bar; without a terminal one that prints every tenth, however long that takes."""
    if sys.stderr.isatty():
        return bar
    tenths = 0

    def update(done: int, total: int) -> None:
        nonlocal tenths
        if 10 * done // total > tenths:
            tenths = 10 * done // total
            tell(f"{doing} {done} of {total}")

    return update
