"""Put the journals of several nodes together, and find the line that says what went wrong."""

from __future__ import annotations

import heapq
import queue
import re
import threading
from collections.abc import Iterable, Iterator, Sequence

from patchkit.cluster.agent.journal import JournalLine
from patchkit.doctor.symptoms.diagnosis import ReadLog, read_log
from patchkit.doctor.symptoms.lines import LONGEST
from patchkit.runtime.rules.condition import Situation

_QUEUED = 1000  # lines
_FATAL = re.compile(
    r"\b(?:[A-Z]\w*(?:Error|Exception)\b(?:: |$)|CUDA error|NCCL WARN|out of memory|Killed"
    r"|error: |fatal: |terminate called|Segmentation fault|ended before it had answered)"
)
# An error that tells of another one, which is what a person looks for.
_FOLLOWS = re.compile(
    r"Engine core init(?:ialization)? failed|See root cause above|EngineDeadError|WorkerProc init"
    r"|cancelled|Traceback"
)


def merged(
    journals: Iterable[tuple[str, Iterable[JournalLine]]],
) -> Iterator[tuple[str, JournalLine]]:
    """Yield the lines of several nodes by time, each with its node."""

    def of(node: str, lines: Iterable[JournalLine]) -> Iterator[tuple[int, str, JournalLine]]:
        for each in lines:
            yield each.time, node, each

    ordered = heapq.merge(*(of(*each) for each in journals), key=lambda each: each[:2])
    return ((node, line) for _time, node, line in ordered)


def first_error(lines: Iterable[tuple[str, JournalLine]]) -> tuple[str, JournalLine] | None:
    """Return the first line that says what went wrong, and its node; None if none does."""
    second = None
    for node, line in lines:
        if not _FATAL.search(line.text):
            continue
        if not _FOLLOWS.search(line.text):
            return node, line
        second = second or (node, line)
    return second


def read_journals(
    lines: Iterable[tuple[str, JournalLine]], known: Situation
) -> tuple[ReadLog, Sequence[str]]:
    """Return what is known of what nodes wrote, and the node of each line: of line 1 the first.

    ``known`` are facts of the cluster. Raises HostError if grep does not run.
    """
    nodes: list[str] = []

    def written() -> Iterator[bytes]:
        for node, line in lines:
            nodes.append(node)
            text = " ".join(line.text.splitlines()).encode(errors="replace")
            # The node's number tells the writers apart; a longer line would count as two.
            yield b"node%d | %s\n" % (numbers.setdefault(node, len(numbers)), text[: LONGEST // 2])

    numbers: dict[str, int] = {}
    return read_log(written(), known), nodes


def as_they_come(
    journals: Iterable[tuple[str, Iterable[JournalLine]]],
) -> Iterator[tuple[str, JournalLine]]:
    """Yield the lines of several nodes when they arrive, without an end."""
    # Of a limited size: a node may write faster than somebody reads.
    arrived: queue.Queue[tuple[str, JournalLine] | None] = queue.Queue(_QUEUED)

    def pump(node: str, lines: Iterable[JournalLine]) -> None:
        for each in lines:
            arrived.put((node, each))
        arrived.put(None)

    open_ends = 0
    for each in journals:
        threading.Thread(target=pump, args=each, daemon=True).start()
        open_ends += 1
    while open_ends:
        found = arrived.get()
        if found is None:
            open_ends -= 1
        else:
            yield found
