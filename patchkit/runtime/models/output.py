"""Follow a program that takes long, from a generator that reports how far it is."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator, Mapping

from patchkit.process import Completed, stream

_PERIOD = 0.5  # seconds in which a silent program is looked after


class _Abandoned(Exception):  # noqa: N818 - no error: nobody listens any more
    """The generator was closed: ends the program."""


def output(*words: str, env: Mapping[str, str]) -> Generator[str, None, Completed]:
    """Yield each line of a program, and "" while it is silent; return how it ended.

    Where the generator is closed, the program is ended as soon as it writes again.
    """
    lines: queue.SimpleQueue[str | Completed] = queue.SimpleQueue()
    abandoned = threading.Event()

    def line(text: str) -> None:
        if abandoned.is_set():
            raise _Abandoned
        lines.put(text)

    def follow() -> None:
        with contextlib.suppress(_Abandoned):
            lines.put(stream(*words, line=line, env=env))

    # A daemon: it may wait for a program that is silent.
    threading.Thread(target=follow, daemon=True).start()
    try:
        while True:
            try:
                said = lines.get(timeout=_PERIOD)
            except queue.Empty:
                said = ""
            if isinstance(said, Completed):
                return said
            yield said
    finally:
        abandoned.set()
