"""Measure the ring between EngineCore and its workers, stock beside the fix shm_spin, in one run.

    nox -s bench -- ring [--release X …] [--messages N]

Upstream's own `MessageQueue` runs in two processes; torch and the rest of vLLM are stood in for.
A message is written every 30 ms, as if that were a step. CPU is the reader's own time over the
clock's, `wake` the time from before a message is written to when it is read. For `lost` the
writer does not notify a reader that has gone to sleep: after how many seconds it reads all the
same. Stock and patched take turns. Needs pyzmq.
"""

from __future__ import annotations

import argparse
import multiprocessing.shared_memory  # upstream takes it from there
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from rich.console import Console
from rich.table import Table

from patchkit.apply import plan_for
from patchkit.errors import PatchkitError
from patchkit.patching.fix import Request
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import open_workspace
from patchkit.proof import upstream_code
from patchkit.recipes.vllm.decisions import on_device
from patchkit.source.tree import SourceTree
from patchkit.target import targets

RING = "vllm/distributed/device_communicators/shm_broadcast.py"
STEP_S = 0.03
PATIENCE_S = 15
ZMQ = ("IPV6", "PUB", "SUB", "SUBSCRIBE", "XPUB", "XPUB_VERBOSE", "Context")
FORK = multiprocessing.get_context("fork")


def main() -> int:
    """Measure, and print a row for each turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", nargs="+", default=["0.25.1", "0.33.0"])
    parser.add_argument("--messages", type=int, default=100)
    asked = parser.parse_args()
    table = Table(
        "vLLM", "ring", "reader's CPU", "wake, median", "95 %", "lost: read after"
    )
    try:
        with tempfile.TemporaryDirectory() as folder, upstream_code.permitted():
            for release in asked.release:
                stock, patched = trees(release, Path(folder) / release)
                for name, tree in (("stock", stock), ("patched", patched)) * 2:
                    table.add_row(release, name, *measure(tree, asked.messages))
    except PatchkitError as error:
        Console().print(f"bench: {error}", markup=False)
        return error.exit_code
    Console().print(table)
    load = os.getloadavg()[0]
    Console().print(f"{platform.machine()}, {os.cpu_count()} CPUs, load {load:.1f}")
    return 0


def trees(release: str, folder: Path) -> tuple[SourceTree, SourceTree]:
    """Return a release as it is, and as the fix leaves it."""
    fetch = [
        sys.executable,
        "-m",
        "patchkit",
        "fetch",
        f"vllm=={release}",
        "--dest",
        str(folder),
    ]
    subprocess.run(fetch, check=True, stdout=subprocess.DEVNULL)
    request = Request(target=targets()["gb10"], only=frozenset({"shm_spin"}))
    plan = plan_for(open_workspace(folder, "vllm"), load_recipe("vllm"), request)
    return plan.stock, plan.patched


def measure(tree: SourceTree, messages: int) -> list[str]:
    """Return the cells of a row."""
    queue = load(tree)
    share, waits = talk(queue, read_steps, write_steps, messages)
    waits.sort()
    slept = talk(queue, read_unnotified, write_unnotified, 1)
    return [
        f"{share:.0%}",
        f"{statistics.median(waits) * 1e6:.0f} us",
        f"{waits[int(len(waits) * 0.95)] * 1e6:.0f} us",
        f"not within {PATIENCE_S} s" if slept is None else f"{slept:.2f} s",
    ]


def load(tree: SourceTree) -> Any:
    """Return upstream's class; it is given the decorators back that a proof has no use for."""
    code = on_device(tree, (12, 1), names={name: getattr(zmq, name) for name in ZMQ})
    code.put(RING, "zmq", zmq)
    code.put(RING, "sched_yield", os.sched_yield)
    code.put(RING, "SPINLOOP_EXT_ENABLED", False)
    code.put(RING, "check_shm_free_space", lambda *_size, **_name: None)
    for owner, names in (
        ("ShmRingBuffer", ("get_data", "get_metadata")),
        ("MessageQueue", ("acquire_read", "acquire_write")),
    ):
        kind = code.get(RING, owner)
        for name in names:
            setattr(kind, name, contextmanager(getattr(kind, name)))
    return code.get(RING, "MessageQueue")


def talk(
    kind: Any, read: Callable[..., None], write: Callable[..., None], messages: int
) -> Any:
    """Return what the reader, a process of its own, says of the messages; None if it is silent."""
    queue = kind(n_reader=1, n_local_reader=1, max_chunk_bytes=1 << 20, max_chunks=10)
    ours, theirs = FORK.Pipe()

    def begin() -> None:
        reader = kind.create_from_handle(queue.export_handle(), 0)
        reader.wait_until_ready()
        reader.dequeue(timeout=PATIENCE_S)
        read(reader, messages, theirs)

    process = FORK.Process(target=begin)
    process.start()
    try:
        queue.wait_until_ready()
        queue.enqueue("begin")
        write(queue, messages)
        return ours.recv() if ours.poll(PATIENCE_S) else None
    finally:
        process.kill()
        process.join()


def write_steps(queue: Any, messages: int) -> None:
    for _ in range(messages):
        time.sleep(STEP_S)
        queue.enqueue(time.monotonic())


def read_steps(queue: Any, messages: int, answer: Any) -> None:
    cpu, clock, waits = time.process_time(), time.monotonic(), []
    for _ in range(messages):
        written = queue.dequeue(timeout=PATIENCE_S)
        waits.append(time.monotonic() - written)
    answer.send(((time.process_time() - cpu) / (time.monotonic() - clock), waits))


def write_unnotified(queue: Any, _messages: int) -> None:
    time.sleep(1.5)
    queue._spin_condition.notify = lambda: None
    queue.enqueue(time.monotonic())


def read_unnotified(queue: Any, _messages: int, answer: Any) -> None:
    written = queue.dequeue(indefinite=True)
    answer.send(time.monotonic() - written)


if __name__ == "__main__":
    sys.exit(main())
