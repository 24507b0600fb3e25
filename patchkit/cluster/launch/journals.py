"""Read what all ranks wrote, in one order, from the journals of the nodes that answer."""

from __future__ import annotations

import heapq
import queue
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from patchkit.cluster.agent.journal import JournalLine, read_units
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.ssh.node import Remote
from patchkit.errors import PatchkitError

_SKEW = 2.0  # seconds
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
    clocks = dict(zip(chosen, cluster.clocks(chosen), strict=True))
    silent = {
        node.destination: error
        for node, error in clocks.items()
        if isinstance(error, PatchkitError)
    }
    ahead = {node: by for node, by in clocks.items() if not isinstance(by, PatchkitError)}
    base = ahead.get(cluster.head, 0.0)

    def read(node: Remote, by: float) -> Iterator[JournalLine]:
        start = f"@{float(since[1:]) + by - base:.6f}" if _EPOCH.fullmatch(since) else since
        try:
            units = cluster.units_of(node)
            for line in read_node_lines(node, units, since=start, lines=lines, follow=follow):
                yield replace(line, time=line.time - round(by * 1e6))
        except PatchkitError as error:
            silent[node.destination] = error

    journals = [(node.destination, read(node, by)) for node, by in ahead.items()]
    merged = merge_arriving(journals) if follow else merge_by_time(journals)
    return GroupJournal(lines=merged, silent=silent, skew=_describe_skew(ahead))


def read_node_lines(
    node: Remote, units: Sequence[str], *, since: str = "", lines: int = 0, follow: bool = False
) -> Iterator[JournalLine]:
    """Yield the lines of a node's units."""
    asked = {"units": list(units), "since": since, "lines": lines, "follow": follow}
    return node.stream(JournalLine, read_units, **asked)


def _describe_skew(ahead: dict[Remote, float]) -> str:
    """Return how far apart the clocks of nodes are, if that is more than a slow login explains."""
    if not ahead:
        return ""
    early, *_, late = sorted([*ahead, *ahead], key=lambda node: ahead[node])
    apart = ahead[late] - ahead[early]
    if apart <= _SKEW:
        return ""
    return f"the clock of {early.destination} is {apart:.0f} s behind that of {late.destination}"


def merge_by_time(
    journals: Iterable[tuple[str, Iterable[JournalLine]]],
) -> Iterator[tuple[str, JournalLine]]:
    """Yield the lines of several nodes by time, each with its node."""

    def with_node(node: str, lines: Iterable[JournalLine]) -> Iterator[tuple[str, JournalLine]]:
        for line in lines:
            yield node, line

    ordered = (with_node(node, lines) for node, lines in journals)
    return heapq.merge(*ordered, key=lambda entry: (entry[1].time, entry[0]))


def merge_arriving(
    journals: Iterable[tuple[str, Iterable[JournalLine]]],
) -> Iterator[tuple[str, JournalLine]]:
    """Yield the lines of several nodes when they arrive, without an end."""
    # Of a limited size: a node may write faster than somebody reads.
    arrived: queue.Queue[tuple[str, JournalLine] | None] = queue.Queue(_QUEUED)

    def pump(node: str, lines: Iterable[JournalLine]) -> None:
        for line in lines:
            arrived.put((node, line))
        arrived.put(None)

    open_ends = 0
    for journal in journals:
        threading.Thread(target=pump, args=journal, daemon=True).start()
        open_ends += 1
    while open_ends:
        entry = arrived.get()
        if entry is None:
            open_ends -= 1
        else:
            yield entry
