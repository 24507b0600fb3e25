"""Raise Ctrl-C, `kill` and a closed terminal where that is safe; hold them back where not."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet

from patchkit.errors import PatchkitError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_blocks = 0  # that are not to be interrupted, one within another
_pending: list[int] = []
_committed: list[tuple[str, Path | None]] = []  # what was changed for good, and where
_raised: WeakSet[Interrupted] = WeakSet()  # while they are on their way
_raised_at = 0.0
# Seconds: a signal that comes so soon does not disturb what the first one ends.
_SAME = 1.0


# As KeyboardInterrupt, so that no `except Exception` swallows it.
class Interrupted(BaseException):
    """The arrival of one of SIGNALS. ``exit_code`` is 128 and its number, as shells have it.

    Its text says what became of the changes of this process.
    """

    def __init__(self, number: int) -> None:
        global _raised_at
        super().__init__(number)
        self.number = number
        self.exit_code = 128 + number
        _raised.add(self)
        _raised_at = time.monotonic()

    def __str__(self) -> str:
        # A scratch tree is gone by now, and its changes with it.
        lasting = [
            text for text, place in _committed if place is None or place.is_dir()
        ]
        changes = "; ".join(dict.fromkeys(lasting)) or "nothing was changed"
        return f"interrupted; {changes}"


def raise_interrupts() -> None:
    """Make SIGNALS raise Interrupted from now on; one that is ignored stays ignored."""
    for number in SIGNALS:
        # The caller chose that, as nohup does.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _strike)
    sys.unraisablehook = _strike_again


def leave_interrupts() -> None:
    """Let SIGNALS end the process from now on: all is done and said, and Python winds itself up.

    Interrupted would be raised there where nobody can catch it, and be printed with its traceback.
    After an interrupt they are ignored: the exit code is decided.
    """
    # Python complains of a signal that comes while its handler is taken away.
    former = signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, signal.SIGALRM))

    # Python would take its handler away at the end, and the alarm then kill the process.
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in SIGNALS:
        if signal.getsignal(number) is _strike:
            signal.signal(number, signal.SIG_IGN if _raised else signal.SIG_DFL)

    signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _begin_child() -> None:
    """Forget, after a fork, what is the parent's: a child has changed nothing yet."""
    global _blocks
    _blocks = 0
    _pending.clear()
    _committed.clear()
    _raised.clear()


os.register_at_fork(after_in_child=_begin_child)


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Raise the Interrupted that an error of the block came from, instead of it.

    Before Python 3.12, what strikes while a class gets its fields comes out as a RuntimeError; and
    a library's own `finally` may fail over the half that was done, as libcst's do with a KeyError.
    """
    try:
        yield
    except Exception as error:
        interrupt = _interrupt_behind(error)
        if interrupt is None:
            raise
        raise interrupt from None


def _interrupt_behind(error: BaseException) -> Interrupted | None:
    """Return the interrupt that an error came from."""
    origin: BaseException | None = error
    while origin is not None:
        if isinstance(origin, Interrupted):
            return origin
        if isinstance(origin, PatchkitError | OSError):
            # What fails while an interrupted change is put away has to be said.
            origin = origin.__cause__
        else:
            origin = origin.__cause__ or origin.__context__
    return None


def _strike_again(unraisable: Any) -> None:
    # Raised in a finaliser, an interrupt goes no further; a moment later it is out of there.
    error = unraisable.exc_value
    if isinstance(error, Interrupted):
        _later(error.number)
    else:
        sys.__unraisablehook__(unraisable)


def _later(number: int) -> None:
    def again(_number: int, frame: FrameType | None) -> None:
        if signal.getsignal(number) is _strike:
            _strike(number, frame)
        else:  # all is done and said by now
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, 0.001)


def _strike(number: int, frame: FrameType | None) -> None:
    # Each word to a terminal that was closed would be an error of its own, up to the last flush.
    if number == signal.SIGHUP:
        _leave_closed_terminal()

    # Here, whether it is held back is just being changed, and would not be changed to its end.
    if frame and frame.f_code.co_filename == _strike.__code__.co_filename:
        _later(number)
    elif _raised and time.monotonic() < _raised_at + _SAME:
        pass  # it belongs to the one that is on its way
    elif _blocks:
        _pending.append(number)
    else:
        raise Interrupted(number)


def _leave_closed_terminal() -> None:
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


# Both are classes: contextlib has code of its own between a block and what follows it.
class deferred:  # noqa: N801
    """Hold Interrupted back until the block ends. An error of the block comes before it."""

    def __enter__(self) -> None:
        global _blocks
        _blocks += 1

    def __exit__(
        self, _kind: object, error: BaseException | None, _traceback: object
    ) -> None:
        global _blocks
        _blocks -= 1
        if error is None and not _blocks:
            _raise_pending()


class undeferred:  # noqa: N801
    """Let Interrupted come at once in a part of a deferred block, unless that is in another."""

    def __enter__(self) -> None:
        global _blocks
        if _blocks == 1:
            _raise_pending()
        _blocks -= 1

    def __exit__(self, *_: object) -> None:
        global _blocks
        _blocks += 1


def _raise_pending() -> None:
    if _pending:
        number = _pending[0]
        _pending.clear()
        raise Interrupted(number)


def committed(what: str, place: Path | None = None) -> None:
    """Note what this process has changed for good: ``the commit was finished, 6 files``.

    With ``place`` it counts only as long as this folder is there.
    """
    _committed.append((what, place))
