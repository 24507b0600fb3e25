"""Ask, change and stop all nodes of a cluster at once, over ssh; read the journals of all ranks."""

from __future__ import annotations

import heapq
import queue
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import NoneType

from patchkit.cluster.agent import node_facts, node_files, node_state
from patchkit.cluster.agent.node_facts import NodeFacts, PeerLink
from patchkit.cluster.agent.node_state import (
    JournalLine,
    NodeLine,
    NodeState,
    UnitState,
    read_units,
)
from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.ssh.node import Remote, require_all, run_on_all
from patchkit.cluster.ssh.ssh import sent_error, ssh_command
from patchkit.errors import HostError, PatchkitError
from patchkit.frozen import Texts, Values, frozen
from patchkit.reading import require_file
from patchkit.records import read_user_toml


@frozen
class Cluster(ClusterFile):
    """The machines of a cluster file, each reached by ssh."""

    @property
    def head(self) -> Remote:
        return self.nodes[0]

    @property
    def nodes(self) -> list[Remote]:
        return [Remote(member.ssh) for member in self.members]

    @property
    def doctor_options(self) -> Texts:
        """Return the options by which `patchkit doctor` looks at these machines."""
        is_alone = self.head.here and len(self.nodes) == 1
        return () if is_alone else ("--cluster",)

    @property
    def units(self) -> list[str]:
        """Return the names of the units that the head may have."""
        return [
            self.unit,
            *self.watch_units,
            self.memory_unit,
            self.guard_unit,
        ]

    def units_of(self, node: Remote) -> list[str]:
        """Return the names of the units that a node may have."""
        if node == self.head:
            return self.units
        return [self.unit, self.memory_unit]

    def with_image(self, image: str) -> Cluster:
        """Return the same cluster with another image in its file."""
        serve = replace(self.serve, image=image)
        return replace(self, serve=serve)

    def facts(self, models: Sequence[str] = ()) -> list[NodeFacts]:
        """Return the facts of all nodes, by rank; ``models`` are the folders of models to look at.

        Raises the first error of a node, with the other nodes' errors in it.
        """

        def look(node: Remote) -> NodeFacts:
            return node.call(
                NodeFacts,
                node_facts.look_at_node,
                name=self.name,
                venv=self.venv,
                models=list(models),
                image=self.serve.image_asked,
                variables=self.rank_variables,
            )

        return require_all(run_on_all(self.nodes, look))

    def states(self) -> list[NodeState | PatchkitError]:
        """Return the state of each node by rank, or the error that kept it from being read."""

        def look(node: Remote) -> NodeState:
            state = node.call(
                NodeState,
                node_state.read_node_state,
                name=self.name,
                units=self.units_of(node),
            )
            self.check_units(node, state.units)
            return state

        return run_on_all(self.nodes, look)

    def check_units(self, node: Remote, states: Sequence[UnitState]) -> None:
        """Raise HostError unless a node's answer has one state for each of its units, in order."""
        if [state.unit for state in states] != self.units_of(node):
            raise HostError(f"{node.destination}: does not say how its units are")

    def links(self, addresses: Sequence[str]) -> list[PeerLink]:
        """Return how the head reaches each worker by ssh.

        ``addresses`` are the workers' addresses on the cable, by rank. Raises HostError for a
        worker that the head does not reach; its hint is the command that tries it again.
        """
        workers = self.members[1:]
        if not workers:
            return []

        name = self.head.destination
        pairs = zip(workers, addresses, strict=True)
        peers = [[worker.from_head, address] for worker, address in pairs]
        links = self.head.call(list[PeerLink], node_facts.try_links, peers=peers)
        if len(links) != len(peers):
            raise HostError(f"{name}: does not say how it reaches each worker")

        for worker, link in zip(workers, links, strict=True):
            if link.error:
                raise HostError(
                    sent_error(link.error, f"from {name}").what,
                    why=f"the head starts and watches {worker.ssh} by ssh, without a password",
                    hint=ssh_command(name, "ssh", worker.from_head),
                )
        return links

    def check_ports(self, addresses: Sequence[str]) -> None:
        """Raise HostError if a firewall keeps the head and a worker from each other.

        Behind it the ranks would wait for each other without a word. ``addresses`` are those of
        all nodes on the cable, by rank.
        """
        head, *workers = addresses
        # The head tries all workers, and each worker tries the head.
        peers_by_rank = [workers, *([head] for _ in workers)]

        def connect(node: Remote, peers: list[str]) -> list[str]:
            return node.call(
                list[str],
                node_facts.try_ports,
                addresses=peers,
                port=node_facts.CHOSEN_PORT,
            )

        node_at = dict(zip(addresses, self.nodes, strict=True))
        answers = require_all(run_on_all(self.nodes, connect, peers_by_rank))
        rows = zip(self.nodes, peers_by_rank, answers, strict=True)
        for node, peers, troubles in rows:
            for address, trouble in zip(peers, troubles, strict=True):
                if trouble:
                    raise _firewall_error(node, node_at[address], address, trouble)

    def put_files(self, files: Sequence[Values]) -> None:
        """Write the files of all nodes, by rank: name to content. The head's are written last.

        Raises what ``node_files.put_files`` raises on a node.
        """

        def put(node: Remote, content: Values) -> None:
            node.call(
                NoneType,
                node_files.put_files,
                name=self.name,
                files=content,
            )

        require_all(run_on_all(self.nodes[1:], put, files[1:]))
        put(self.head, files[0])

    def alone(self) -> AbstractContextManager[bool]:
        """Keep other patchkits from changing the cluster during a block.

        Raises BusyError if another one changes it now.
        """
        return self.head.opened(bool, node_files.hold_alone, name=self.name)


def read_cluster_file(path: Path) -> Cluster:
    """Return the cluster of a ``cluster.toml``.

    Raises UsageError if there is no such file, and with the line of a wrong key or value.
    """
    require_file(path, "write one: patchkit cluster init spark-1 spark-2")
    return read_user_toml(Cluster, path)


def _firewall_error(
    node: Remote,
    peer: Remote,
    address: str,
    trouble: str,
) -> HostError:
    what = f"{node.destination}: {peer.destination} lets no TCP through at {address}"
    rules = ssh_command(peer.destination, "sudo", "nft", "list", "ruleset")
    return HostError(
        f"{what}: port {node_facts.CHOSEN_PORT}: {trouble}",
        why="a firewall; besides ssh, ranks need ports there that the system chooses for torch, "
        "gloo and NCCL",
        hint="let the nodes reach each other on the cable; what is filtered there: "
        f"`{rules}`",
    )


_LONGEST = 1e10  # seconds: no clock is further off (300 years)
_EPOCH = re.compile(r"@\d+(\.\d+)?")
_QUEUED = 1000  # lines: a node may write faster than somebody reads


@frozen
class GroupJournal:
    """The journal lines of all ranks, each with the name of its node.

    Times are by this machine's clock, and ``lines`` are in their order; those that are followed
    come as they arrive. ``silent`` has the error of each node that did not answer; it is complete
    once ``lines`` is read to its end.
    """

    lines: Iterator[NodeLine]
    silent: dict[str, PatchkitError]


def read_group_journal(
    cluster: Cluster,
    *,
    since: str = "",
    lines: int = 0,
    nodes: Sequence[str] = (),
    follow: bool = False,
) -> GroupJournal:
    """Return the journals of all ranks, from the nodes that answer.

    ``since`` is as journalctl takes it, by each node's own clock, or ``@SECONDS`` since 1970 by
    the head's clock. ``lines`` is how many of the newest each node gives, 0 for all; ``nodes`` are
    the names of the nodes to read, none for all.
    """
    chosen = cluster.nodes
    if nodes:
        chosen = [node for node in chosen if node.destination in nodes]
    silent: dict[str, PatchkitError] = {}
    offsets: dict[Remote, float] = {}

    clocks = run_on_all(chosen, _clock_offset)
    for node, offset in zip(chosen, clocks, strict=True):
        if isinstance(offset, PatchkitError):
            silent[node.destination] = offset
        else:
            offsets[node] = offset

    head_offset = offsets.get(cluster.head, 0.0)

    def read(node: Remote, offset: float) -> Iterator[NodeLine]:
        start = since
        if _EPOCH.fullmatch(since):
            # From the head's clock to this node's.
            start = f"@{float(since[1:]) + offset - head_offset:.6f}"

        try:
            for line in node.stream(
                JournalLine,
                read_units,
                units=cluster.units_of(node),
                since=start,
                lines=lines,
                follow=follow,
            ):
                moment = line.time - round(offset * 1e6)
                yield node.destination, replace(line, time=moment)
        except PatchkitError as error:
            silent[node.destination] = error

    journals = [read(node, offset) for node, offset in offsets.items()]
    merged = heapq.merge(*journals, key=lambda entry: (entry[1].time, entry[0]))
    return GroupJournal(
        lines=_merge_arriving(journals) if follow else merged,
        silent=silent,
    )


def _clock_offset(node: Remote) -> float:
    """Return by how many seconds a node's clock is ahead of this machine's.

    Raises HostError for an answer that no clock gives.
    """
    if node.here:
        return 0.0

    # The node looks at its clock last: the time of the login and of Python's start is not in it.
    offset = node.call(float, time.time) - time.time()
    if abs(offset) > _LONGEST:
        raise HostError(f"{node.destination}: its clock says nothing")
    return offset


def _merge_arriving(
    journals: Sequence[Iterator[NodeLine]],
) -> Iterator[NodeLine]:
    """Yield the lines of journals as they arrive, each journal read by its own thread."""
    arrived: queue.Queue[NodeLine | None] = queue.Queue(_QUEUED)

    def pump(lines: Iterator[NodeLine]) -> None:
        for entry in lines:
            arrived.put(entry)
        arrived.put(None)

    for lines in journals:
        thread = threading.Thread(target=pump, args=[lines], daemon=True)
        thread.start()

    for _journal in journals:
        while (entry := arrived.get()) is not None:
            yield entry


def stop_group(
    cluster: Cluster, *, disable: bool = True
) -> list[NodeState | PatchkitError]:
    """Stop a whole group; return the state of each node after it, or the node's error.

    The head is stopped first: that ends its workers as well. With ``disable`` the group does
    not come back at a boot.
    """

    def stop(node: Remote) -> NodeState:
        return node.call(
            NodeState,
            node_state.end_group,
            name=cluster.name,
            disable=disable,
            units=cluster.units_of(node),
        )

    head, *workers = cluster.nodes
    return run_on_all([head], stop) + run_on_all(workers, stop)


def end_left_nodes(
    cluster: Cluster, states: Sequence[NodeState | PatchkitError]
) -> list[str]:
    """Stop and disable the former start on nodes that cluster.toml does not name any more.

    ``states`` are those of the nodes in cluster.toml. The state of any node names all nodes of the
    former start. Returns a warning for each node that was taken out of the file and where something
    still runs, or that does not answer.
    """
    name = cluster.name
    starts: dict[str, str] = {}
    for state in states:
        if isinstance(state, NodeState):
            starts |= dict.fromkeys(state.members, state.start)
    for node in cluster.nodes:
        starts.pop(node.destination, None)

    def end(node: Remote) -> str:
        start = starts[node.destination]
        return node.call(
            str,
            node_state.end_start,
            name=name,
            start=start,
        )

    nodes = [Remote(member) for member in starts]
    remains = []
    for node, answer in zip(nodes, run_on_all(nodes, end), strict=True):
        if isinstance(answer, PatchkitError):
            text = f"{answer.what}; at its next boot it may start the old model again"
            remains.append(f"{text}: `{stop_command(node, name)}`")
        elif answer:
            remains.append(f"{node.destination}: {answer}")
    return remains


def stop_command(node: Remote, name: str) -> str:
    """Return the command that stops a cluster's unit on a node, also after a boot."""
    words = ("systemctl", "--user", "disable", "--now", f"patchkit-{name}.service")
    return ssh_command(node.destination, *words)


def check_stopped(
    cluster: Cluster,
    results: Sequence[NodeState | PatchkitError],
    remains: Iterable[str] = (),
) -> None:
    """Raise HostError if something is left on a node, or if a node did not answer.

    ``results`` is from ``stop_group``, ``remains`` from ``end_left_nodes``.
    """
    troubles = [*remains]
    cures = []
    for node, result in zip(cluster.nodes, results, strict=True):
        if isinstance(result, PatchkitError):
            troubles.append(result.what)
            cures.append(result.hint)
        elif result.left:
            troubles.append(f"{node.destination}: {result.left}")
    if not troubles:
        return

    raise HostError(
        "not stopped everywhere: " + "; ".join(troubles),
        why="a node that did not answer may still hold memory; a rank ends by itself after "
        "15 s without its head, and a head that boots starts all again",
        hint="; then ".join(filter(None, [*cures[:1], "`patchkit down` again"])),
    )
