"""Read what all ranks wrote, in one order, from the journals of the nodes that answer."""

from __future__ import annotations

import heapq
import queue
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from patchkit.cluster.agent.journal import JournalLine, read_units
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.ssh.node import Remote, everywhere
from patchkit.errors import HostError, PatchkitError

_LONGEST = 1e10  # seconds: what no calendar has
_EPOCH = re.compile(r"@\d+(\.\d+)?")
_QUEUED = 1000  # lines: a node may write faster than somebody reads


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJournal:
    """The lines of all ranks by time, by this machine's clock, each with its node.

    ``silent`` are nodes that did not answer, and why: more may come with the lines.
    """

    lines: Iterator[tuple[str, JournalLine]]
    silent: dict[str, PatchkitError]


def read_group_journal(
    cluster: Cluster,
    *,
    since: str = "",
    lines: int = 0,
    nodes: Sequence[str] = (),
    follow: bool = False,
) -> GroupJournal:
    """Return what the ranks wrote, on the nodes that answer.

    ``since`` is as journalctl takes it, by each node's own clock; ``@SECONDS`` is by the head's.
    """
    chosen = [node for node in cluster.nodes if not nodes or node.destination in nodes]
    silent: dict[str, PatchkitError] = {}
    ahead: dict[Remote, float] = {}
    for node, offset in zip(chosen, everywhere(chosen, _clock_offset), strict=True):
        if isinstance(offset, PatchkitError):
            silent[node.destination] = offset
        else:
            ahead[node] = offset
    base = ahead.get(cluster.head, 0.0)

    def read(node: Remote, offset: float) -> Iterator[tuple[str, JournalLine]]:
        start = f"@{float(since[1:]) + offset - base:.6f}" if _EPOCH.fullmatch(since) else since
        asked = {"since": start, "lines": lines, "follow": follow}
        try:
            for line in node.stream(JournalLine, read_units, units=cluster.units_of(node), **asked):
                yield node.destination, replace(line, time=line.time - round(offset * 1e6))
        except PatchkitError as error:
            silent[node.destination] = error

    journals = [read(node, offset) for node, offset in ahead.items()]
    merged = _merge_arriving(journals) if follow else merge_by_time(journals)
    return GroupJournal(lines=merged, silent=silent)


def _clock_offset(node: Remote) -> float:
    """Return the seconds that a node's clock is ahead of this machine's."""
    # As it was sent: what the login and Python take before that is not in it.
    ahead = 0.0 if node.here else node.call(float, time.time) - time.time()
    if abs(ahead) > _LONGEST:
        raise HostError(f"{node.destination}: its clock says nothing")
    return ahead


def merge_by_time(
    journals: Iterable[Iterator[tuple[str, JournalLine]]],
) -> Iterator[tuple[str, JournalLine]]:
    """Yield the lines of several nodes by time, each with its node."""
    return heapq.merge(*journals, key=lambda entry: (entry[1].time, entry[0]))


def _merge_arriving(
    journals: Sequence[Iterator[tuple[str, JournalLine]]],
) -> Iterator[tuple[str, JournalLine]]:
    arrived: queue.Queue[tuple[str, JournalLine] | None] = queue.Queue(_QUEUED)

    def pump(lines: Iterator[tuple[str, JournalLine]]) -> None:
        for entry in lines:
            arrived.put(entry)
        arrived.put(None)

    for lines in journals:
        threading.Thread(target=pump, args=[lines], daemon=True).start()
    for _ in journals:
        while (entry := arrived.get()) is not None:
            yield entry
