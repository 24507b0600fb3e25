"""Ask and change a whole cluster: every node at once, over ssh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from patchkit.errors import HostError, PatchkitError
from patchkit.quoting import quoted
from patchkit.records import record
from patchkit.runtime.launch.cluster_file import ClusterFile, ClusterNode
from patchkit.runtime.on_node import control, node_facts, node_files, unit_state
from patchkit.runtime.on_node import links as on_head
from patchkit.runtime.on_node.links import PeerLink
from patchkit.runtime.on_node.node_facts import NodeFacts
from patchkit.runtime.on_node.unit_state import NodeState
from patchkit.runtime.remote.everywhere import all_of, everywhere
from patchkit.runtime.remote.failure import sent_error
from patchkit.runtime.remote.node import Remote


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
        name = self.file.name
        watches = [f"patchkit-{name}-worker@{n}.service" for n in range(1, len(self.file.node))]
        return [self.file.unit, *watches, f"patchkit-{name}-ray.service"]

    def facts(self, models: Sequence[str] = ()) -> list[NodeFacts]:
        """Return the facts of all nodes. Raises the first error of a node, naming the others."""
        return all_of(self.tried_facts(models))

    def tried_facts(self, models: Sequence[str] = ()) -> list[NodeFacts | PatchkitError]:
        """Return the facts of each node, or why there are none."""

        def ask(node: Remote) -> NodeFacts:
            said = node.call(
                node_facts.look, name=self.file.name, venv=self.file.venv, models=list(models)
            )
            return record(NodeFacts, said)

        return everywhere(self.nodes, ask)

    def states(self) -> list[NodeState | PatchkitError]:
        """Return the state of each node, or why it is not known."""

        def ask(node: Remote) -> NodeState:
            units = self.units if node == self.head else [self.file.unit]
            return record(NodeState, node.call(unit_state.state, name=self.file.name, units=units))

        return everywhere(self.nodes, ask)

    def links(self, addresses: Sequence[str]) -> list[PeerLink]:
        """Return how the head reaches each worker, by their addresses on the cable.

        Raises HostError for a worker that it does not reach, with what to do on the head.
        """
        workers = self.file.node[1:]
        if not workers:
            return []
        peers = [[each.from_head, where] for each, where in zip(workers, addresses, strict=True)]
        found = record(tuple[PeerLink, ...], self.head.call(on_head.links, peers=peers))
        for worker, link in zip(workers, found, strict=True):
            if link.error:
                raise self._not_linked(worker, link)
        return list(found)

    def _not_linked(self, worker: ClusterNode, link: PeerLink) -> HostError:
        error = sent_error(link.error, f"from {self.head.destination}")
        hint = error.hint
        if not self.head.here:
            hint = f"on {self.head.destination} ({quoted('ssh', self.head.destination)}): {hint}"
        return HostError(
            error.what,
            why=f"the head starts and watches {worker.ssh} by ssh, without a password"
            + (f"; {error.why}" if error.why else ""),
            hint=hint,
        )

    def put(self, files: Sequence[dict[str, str]]) -> None:
        """Write the files of all nodes, the workers' first. Raises what ``node_files.put`` does."""
        pairs = list(zip(self.nodes, files, strict=True))

        def write(pair: tuple[Remote, dict[str, str]]) -> None:
            node, its = pair
            node.call(control.place, name=self.file.name, files=its)

        all_of(everywhere(pairs[1:], write))
        write(pairs[0])

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the cluster: no other patchkit changes it meanwhile. Raises BusyError."""
        hold = self.head.stream(node_files.hold_alone, name=self.file.name)
        next(hold)
        try:
            yield
        finally:
            hold.close()  # type: ignore[attr-defined]  # a generator's
