"""Assemble many fat binaries in parallel on all cores, within the available memory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from patchkit.errors import BuildError, PatchkitError, SourceError
from patchkit.source.fetch import Progress
from patchkit.wheel.build.machine import available_memory
from patchkit.wheel.native.assemble import Assembler, Job, Task

Results = dict[Job, Task | PatchkitError]

_SHARE = 0.8  # of the memory that is available


def assemble_all(
    assembler: Assembler,
    jobs: Sequence[Job],
    progress: Progress,
) -> Results:
    """Assemble jobs on all cores, the largest first; return job → its task, or its error.

    Only as many jobs run at once as the memory allows. ``progress`` is called after each job with
    the bytes of PTX that are done and all bytes. Errors of one job (SourceError, BuildError) are in
    the result; any other error stops all jobs and is raised.
    """
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    memory = _Memory(int(available_memory() * _SHARE))

    try:
        results, tasks = _plan_all(assembler, jobs)
        results |= _make_all(pool, assembler, tasks, memory, progress)
    except BaseException:
        assembler.stopped.set()  # else shutdown would wait for running jobs for minutes
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        assembler.stopped.clear()

    return results


def _plan_all(assembler: Assembler, jobs: Sequence[Job]) -> tuple[Results, list[Task]]:
    """Read all PTX. Return the cached results and errors, and the tasks still to be done."""
    results: Results = {}
    tasks: list[Task] = []
    for job in jobs:
        try:
            task = assembler.plan(job)
        except (SourceError, BuildError) as error:
            results[job] = error
            continue

        if task.is_done:
            results[job] = task
        else:
            tasks.append(task)

    return results, tasks


def _make_all(
    pool: ThreadPoolExecutor,
    assembler: Assembler,
    tasks: Sequence[Task],
    memory: _Memory,
    progress: Progress,
) -> Results:
    def make(task: Task) -> Task | PatchkitError:
        try:
            with memory.held(task.job.resources.memory or 0):
                assembler.make(task)
        except (SourceError, BuildError) as error:
            return error
        return task

    longest_first = sorted(tasks, key=lambda task: -task.job.size)
    work = {pool.submit(make, task): task.job for task in longest_first}
    total = sum(task.job.size for task in tasks)
    done = 0
    results: Results = {}

    progress(done, total)
    for future in as_completed(work):
        job = work[future]
        results[job] = future.result()
        done += job.size
        progress(done, total)
    return results


class _Memory:
    """Let threads wait until there is memory for their work.

    A thread that needs more than all of it waits until nobody else holds any.
    """

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def held(self, size: int) -> Iterator[None]:
        size = min(size, self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()
