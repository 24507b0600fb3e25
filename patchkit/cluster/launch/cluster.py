"""Ask and change a whole cluster, every node at once, over ssh; read what all ranks wrote."""

from __future__ import annotations

import heapq
import queue
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import NoneType

from patchkit.cluster.agent import links as on_head
from patchkit.cluster.agent import node_facts, node_files, node_state
from patchkit.cluster.agent.links import PeerLink
from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.agent.node_state import NodeState
from patchkit.cluster.agent.unit_journal import JournalLine, read_units
from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.ssh.node import Remote, require_all, run_on_all
from patchkit.cluster.ssh.ssh import sent_error, ssh_command
from patchkit.errors import HostError, PatchkitError


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines of a cluster file, each reached by ssh."""

    file: ClusterFile

    @property
    def head(self) -> Remote:
        return Remote(self.file.head.ssh)

    @property
    def nodes(self) -> list[Remote]:
        return [Remote(each.ssh) for each in self.file.node]

    @property
    def units(self) -> list[str]:
        """Return the units that a head may have; a worker has the first alone."""
        ray = self.file.unit_name("-ray")
        return [self.file.unit, *self.file.watch_units, ray, self.file.guard_unit]

    def units_of(self, node: Remote) -> list[str]:
        """Return the units that a node may have."""
        return self.units if node == self.head else [self.file.unit]

    def with_image(self, image: str) -> Cluster:
        """Return the cluster with another image."""
        return Cluster(replace(self.file, serve=replace(self.file.serve, image=image)))

    def facts(self, models: Sequence[str] = ()) -> list[NodeFacts]:
        """Return the facts of all nodes. Raises the first error of a node, naming the others."""
        asked = {"name": self.file.name, "venv": self.file.venv, "models": list(models)}
        image, look = self.file.serve.image_asked, node_facts.look_at_node
        return require_all(
            run_on_all(
                self.nodes,
                lambda node: node.call(NodeFacts, look, **asked, image=image),
            )
        )

    def states(self) -> list[NodeState | PatchkitError]:
        """Return the state of each node, or why it is not known."""

        def ask(node: Remote) -> NodeState:
            asked = {"name": self.file.name, "units": self.units_of(node)}
            state = node.call(NodeState, node_state.read_node_state, **asked)
            if [unit.unit for unit in state.units] != self.units_of(node):
                raise HostError(f"{node.destination}: does not say how its units are")
            return state

        return run_on_all(self.nodes, ask)

    def links(self, addresses: Sequence[str]) -> list[PeerLink]:
        """Return how the head reaches each worker, by their addresses on the cable.

        Raises HostError for a worker that it does not reach, with the command that tries it.
        """
        workers, name = self.file.node[1:], self.head.destination
        peers = [
            [it.from_head, address]
            for it, address in zip(workers, addresses, strict=True)
        ]
        found = (
            self.head.call(list[PeerLink], on_head.try_links, peers=peers)
            if peers
            else []
        )
        if len(found) != len(peers):
            raise HostError(f"{name}: does not say how it reaches each worker")
        for worker, link in zip(workers, found, strict=True):
            if link.error:
                raise HostError(
                    sent_error(link.error, f"from {name}").what,
                    why=f"the head starts and watches {worker.ssh} by ssh, without a password",
                    hint=ssh_command(name, "ssh", worker.from_head),
                )
        return found

    def check_ports(self, addresses: Sequence[str]) -> None:
        """Raise HostError if a firewall keeps the head and a worker from each other.

        ``addresses`` are those on the cable by rank. Ranks would wait for each other in silence.
        """
        head, *workers = addresses
        targets = [workers, *([head] for _ in workers)]
        pairs = list(zip(self.nodes, targets, strict=True))

        def ask(pair: tuple[Remote, list[str]]) -> list[str]:
            asked = {"addresses": pair[1], "port": on_head.CHOSEN_PORT}
            return pair[0].call(list[str], on_head.try_ports, **asked)

        names = dict(zip(addresses, self.nodes, strict=True))
        for (node, tried), troubles in zip(
            pairs, require_all(run_on_all(pairs, ask)), strict=True
        ):
            for address, trouble in zip(tried, troubles, strict=True):
                if trouble:
                    raise _firewall_error(node, names[address], address, trouble)

    def put_files(self, files: Sequence[dict[str, str]]) -> None:
        """Write the files of all nodes, the workers' first. Raises as that does on a node."""
        pairs, put = list(zip(self.nodes, files, strict=True)), node_files.put_files
        name = self.file.name
        for some in (pairs[1:], pairs[:1]):
            require_all(
                run_on_all(
                    some, lambda at: at[0].call(NoneType, put, name=name, files=at[1])
                )
            )

    def alone(self) -> AbstractContextManager[bool]:
        """Hold the cluster: no other patchkit changes it meanwhile. Raises BusyError."""
        return self.head.opened(bool, node_files.hold_alone, name=self.file.name)


def _firewall_error(
    node: Remote, peer: Remote, address: str, trouble: str
) -> HostError:
    return HostError(
        f"{node.destination}: {peer.destination} lets no TCP through at {address}: port "
        f"{on_head.CHOSEN_PORT}: {trouble}",
        why="a firewall; besides ssh, ranks need ports there that the system chooses for torch, "
        "gloo and NCCL",
        hint="let the nodes reach each other on the cable; what is filtered there: "
        f"`{ssh_command(peer.destination, 'sudo', 'nft', 'list', 'ruleset')}`",
    )


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
    # As it was sent: what the login and Python take before that is not in it.
    clocks = run_on_all(
        chosen,
        lambda node: 0.0 if node.here else node.call(float, time.time) - time.time(),
    )
    for node, offset in zip(chosen, clocks, strict=True):
        if isinstance(offset, PatchkitError):
            silent[node.destination] = offset
        elif abs(offset) > _LONGEST:
            silent[node.destination] = HostError(
                f"{node.destination}: its clock says nothing"
            )
        else:
            ahead[node] = offset
    base = ahead.get(cluster.head, 0.0)

    def read(node: Remote, offset: float) -> Iterator[tuple[str, JournalLine]]:
        start = (
            f"@{float(since[1:]) + offset - base:.6f}"
            if _EPOCH.fullmatch(since)
            else since
        )
        asked = {"since": start, "lines": lines, "follow": follow}
        try:
            for line in node.stream(
                JournalLine, read_units, units=cluster.units_of(node), **asked
            ):
                yield (
                    node.destination,
                    replace(line, time=line.time - round(offset * 1e6)),
                )
        except PatchkitError as error:
            silent[node.destination] = error

    journals = [read(node, offset) for node, offset in ahead.items()]
    by_time = heapq.merge(*journals, key=lambda entry: (entry[1].time, entry[0]))
    return GroupJournal(
        lines=_merge_arriving(journals) if follow else by_time, silent=silent
    )


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
