"""Calls side by side: the first here, each other one in a process that is forked for it.

Threads would do for calls that wait, but a proof forks a sandbox, and a process with threads should
not fork. The calls are patchkit's own; upstream's code runs in their children.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Sequence
from typing import Generic, NoReturn, TypeVar

from patchkit.durable.signals import Interrupted, deferred, obey
from patchkit.errors import StorageError
from patchkit.follow import ending
from patchkit.proof.child_process import die_with, fork

T = TypeVar("T")
_STOP = signal.SIGUSR1


def side_by_side(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return what each call returns; raise what the first of them, in their order, raises.

    What a call changes in memory is lost with its process, if it has one.
    """
    jobs: list[_Job[T]] = []
    try:
        for call in calls[1:]:
            with deferred():  # none is started that is not stopped
                jobs.append(_Job(call))
        return [*(call() for call in calls[:1]), *(job.result() for job in jobs)]
    finally:
        with deferred():
            for job in jobs:
                job.stop()


class _Job(Generic[T]):
    def __init__(self, call: Callable[[], T]) -> None:
        parent = os.getpid()
        # No pipe: the parent reads after its own call, and a child would wait on a full pipe.
        self._result = os.memfd_create("result")
        self._child = fork()
        self._running = True
        if not self._child:
            _run_child(call, self._result, parent)

    def result(self) -> T:
        """Wait for it. Raises what the call raises."""
        status = self._wait()
        with open(self._result, "rb", closefd=False) as file:
            file.seek(0)
            data = file.read()
        if not data:
            killed = status == -signal.SIGKILL
            raise StorageError(
                f"a process of patchkit's ended early: {ending(status) or 'without an answer'}",
                why="Linux kills so for want of memory; else somebody did" if killed else "",
            )
        value, error = pickle.loads(data)  # noqa: S301  written by this very program
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def stop(self) -> None:
        if self._running:
            os.kill(self._child, _STOP)
            self._wait()
        os.close(self._result)

    def _wait(self) -> int:
        os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOWAIT)
        # An interrupt in between would have `stop` send a signal to a number that is free again.
        with deferred():
            status = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
            self._running = False
        return status


def _run_child(call: Callable[[], object], result: int, parent: int) -> NoReturn:
    """Live the child's whole life. The parent ends it, after it has put its own things away."""
    try:
        obey(_STOP)
        die_with(parent, _STOP)
        try:
            outcome: tuple[object, Exception | None] = (call(), None)
        except Exception as error:  # noqa: BLE001
            outcome = (None, error)
        with open(result, "wb", closefd=False) as file:
            file.write(pickle.dumps(outcome))
    except Interrupted:
        pass  # here its frames go, and with them what they hold
    finally:
        # os._exit: the parent's exit hooks and finally blocks are not the child's to run.
        os._exit(0)
