"""Turn Ctrl-C, `kill` and a closed terminal into an exception; hold it back where it would harm."""

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

_blocks = 0  # depth of nested `deferred` blocks
_pending: list[int] = []  # numbers of signals that came in a `deferred` block
_committed: list[tuple[str, Path | None]] = []  # what was changed for good, and where
_raised: WeakSet[Interrupted] = WeakSet()  # interrupts that nobody has handled yet
_raised_at = 0.0
# Seconds: another signal within this time is ignored, so that cleaning up is not interrupted.
_SAME = 1.0


# No Exception, like KeyboardInterrupt, so that no `except Exception` swallows it.
class Interrupted(BaseException):
    """The arrival of one of SIGNALS.

    ``exit_code`` is 128 plus the number of the signal, as in shells. The text names the changes
    that this process has committed.
    """

    def __init__(self, number: int) -> None:
        global _raised_at
        super().__init__(number)
        self.number = number
        self.exit_code = 128 + number
        _raised.add(self)
        _raised_at = time.monotonic()

    def __str__(self) -> str:
        # The changes of a scratch tree do not count: it is removed by now.
        lasting = [
            text for text, place in _committed if place is None or place.is_dir()
        ]
        changes = "; ".join(dict.fromkeys(lasting)) or "nothing was changed"
        return f"interrupted; {changes}"


def raise_interrupts() -> None:
    """Make SIGNALS raise Interrupted from now on, except a signal that is ignored already."""
    for number in SIGNALS:
        # A caller such as nohup chose to ignore it.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _strike)
    sys.unraisablehook = _strike_again


def leave_interrupts() -> None:
    """Let SIGNALS end the process from now on, for the time in which Python shuts down.

    Nobody could catch Interrupted then, and Python would print its traceback. After an interrupt
    the signals are ignored, since the exit code is decided.
    """
    # Python reports an error for a signal that comes while its handler is removed.
    former = signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, signal.SIGALRM))

    # At its end Python removes the handler of the alarm: a late alarm would kill the process.
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in SIGNALS:
        if signal.getsignal(number) is _strike:
            signal.signal(number, signal.SIG_IGN if _raised else signal.SIG_DFL)

    signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _begin_child() -> None:
    """Reset the state after a fork: the changes and signals of the parent are not the child's."""
    global _blocks
    _blocks = 0
    _pending.clear()
    _committed.clear()
    _raised.clear()


os.register_at_fork(after_in_child=_begin_child)


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Raise Interrupted instead of an error of the block that an Interrupted caused.

    Before Python 3.12, an interrupt during the definition of a class comes out as a RuntimeError.
    A `finally` of a library may fail after an interrupt, as those of libcst do with a KeyError.
    """
    try:
        yield
    except Exception as error:
        interrupt = _interrupt_behind(error)
        if interrupt is None:
            raise
        raise interrupt from None


def _interrupt_behind(error: BaseException) -> Interrupted | None:
    """Return the interrupt that caused an error, None if none did."""
    origin: BaseException | None = error
    while origin is not None:
        if isinstance(origin, Interrupted):
            return origin
        if isinstance(origin, PatchkitError | OSError):
            # A failure to clean up after an interrupt must be shown: follow explicit causes only.
            origin = origin.__cause__
        else:
            origin = origin.__cause__ or origin.__context__
    return None


def _strike_again(unraisable: Any) -> None:
    # An interrupt that is raised in a finaliser gets lost: raise it again when that has ended.
    error = unraisable.exc_value
    if isinstance(error, Interrupted):
        _later(error.number)
    else:
        sys.__unraisablehook__(unraisable)


def _later(number: int) -> None:
    def again(_number: int, frame: FrameType | None) -> None:
        if signal.getsignal(number) is _strike:
            _strike(number, frame)
        else:  # `leave_interrupts` was called meanwhile
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, 0.001)


def _strike(number: int, frame: FrameType | None) -> None:
    # Every write to a closed terminal would fail, up to the last flush.
    if number == signal.SIGHUP:
        _leave_closed_terminal()

    # The signal came inside this module, whose state may be half changed: raise it a moment later.
    if frame and frame.f_code.co_filename == _strike.__code__.co_filename:
        _later(number)
    elif _raised and time.monotonic() < _raised_at + _SAME:
        pass  # the first signal is still being handled
    elif _blocks:
        _pending.append(number)
    else:
        raise Interrupted(number)


def _leave_closed_terminal() -> None:
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


# Classes, since contextlib runs code of its own at the end of a block, where a signal could come.
class deferred:  # noqa: N801
    """Hold Interrupted back until the block ends; an error of the block is raised instead of it."""

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
    """Allow Interrupted in a part of a deferred block, unless that block is in another one."""

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
    """Note a lasting change for the text of Interrupted: ``the commit was finished, 6 files``.

    With ``place`` the change is named only as long as this folder exists.
    """
    _committed.append((what, place))
