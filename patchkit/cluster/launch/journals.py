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

_SKEW = 2.0  # seconds
_LONGEST = 1e10  # seconds: what no calendar has
_EPOCH = re.compile(r"@\d+(\.\d+)?")
_QUEUED = 1000  # lines


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJournal:
    """The lines of all ranks by time, by this machine's clock, each with its node.

    ``silent`` are nodes that did not answer, and why: more may come with the lines. ``skew`` is how
    far clocks are apart, "" for two seconds at most.
    """

    lines: Iterator[tuple[str, JournalLine]]
    silent: dict[str, PatchkitError]
    skew: str = ""

    def remarks(self) -> list[str]:
        """Return what a reader of the lines has to know."""
        missing = [f"without the lines of {error.what}" for error in self.silent.values()]
        return [*missing, self.skew] if self.skew else missing


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

    skew = ""
    if ahead:
        early, late = min(ahead, key=ahead.__getitem__), max(ahead, key=ahead.__getitem__)
        if (apart := ahead[late] - ahead[early]) > _SKEW:
            skew = f"the clock of {early.destination} is {apart:.0f} s behind that of "
            skew += late.destination
    journals = [read(node, offset) for node, offset in ahead.items()]
    merged = merge_arriving(journals) if follow else merge_by_time(journals)
    return GroupJournal(lines=merged, silent=silent, skew=skew)


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


def merge_arriving(
    journals: Iterable[Iterator[tuple[str, JournalLine]]],
) -> Iterator[tuple[str, JournalLine]]:
    """Yield the lines of several nodes when they arrive, without an end."""
    # Of a limited size: a node may write faster than somebody reads.
    arrived: queue.Queue[tuple[str, JournalLine] | None] = queue.Queue(_QUEUED)

    def pump(lines: Iterator[tuple[str, JournalLine]]) -> None:
        for entry in lines:
            arrived.put(entry)
        arrived.put(None)

    threads = [threading.Thread(target=pump, args=[lines], daemon=True) for lines in journals]
    for thread in threads:
        thread.start()
    for _ in threads:
        while (entry := arrived.get()) is not None:
            yield entry
