"""Show in a terminal that a verb is at work while it prints nothing: a line that goes away."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

_SILENCE = 0.5  # seconds
_ERASE = "\r\x1b[K"


class _Terminal:
    """The terminal that all output goes to; ``held`` counts who draws or asks there meanwhile."""

    def __init__(self) -> None:
        self.watched = self.drawn = False
        self.held = 0
        self.printed = time.monotonic()
        self.lock = threading.Lock()

    def watch(self) -> None:
        """Draw the seconds of silence, for as long as the process lives."""
        while True:
            time.sleep(_SILENCE)
            with self.lock:
                silent = time.monotonic() - self.printed
                if silent >= _SILENCE and not self.held:
                    self.drawn = True
                    # Not through Python's buffers: a fork could leave their locks taken for ever.
                    _write(f"{_ERASE}at work, {silent:.0f} s")

    def erase(self) -> None:
        with self.lock:
            self.printed = time.monotonic()
            if self.drawn:
                _write(_ERASE)
            self.drawn = False


_terminal = _Terminal()


def watch_silence() -> None:
    """Begin to show that the process is at work, if all that it prints goes to a terminal."""
    if not _terminal.watched and os.isatty(1) and os.isatty(2):
        _terminal.watched = True
        os.register_at_fork(after_in_child=lambda: setattr(_terminal, "watched", False))
        threading.Thread(target=_terminal.watch, daemon=True).start()


def end_silence() -> None:
    """Make room for something that is going to be printed."""
    if _terminal.watched:
        _terminal.erase()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Leave the terminal to bars, to a question, or to what waits by design."""
    _terminal.held += 1
    end_silence()
    try:
        yield
    finally:
        _terminal.held -= 1
        end_silence()


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
