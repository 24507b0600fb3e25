"""Ask and change a whole cluster: every node at once, over ssh."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from patchkit.cluster.agent import control, node_facts, node_files, unit_state
from patchkit.cluster.agent import links as on_head
from patchkit.cluster.agent.links import PeerLink
from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.agent.unit_state import NodeState, UnitState
from patchkit.cluster.launch.cluster_file import ClusterFile, ClusterNode
from patchkit.cluster.ssh.answer import LEASE
from patchkit.cluster.ssh.failure import sent_error
from patchkit.cluster.ssh.node import Remote, all_of, everywhere
from patchkit.cluster.ssh.ssh import advice
from patchkit.errors import BusyError, HostError, PatchkitError
from patchkit.quoting import quoted

_LONGEST = 1e10  # seconds: what no calendar has


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
    def here_words(self) -> list[str]:
        """Return the option that names a cluster of this machine alone in a next command."""
        return ["--here"] if self.head.here and len(self.file.node) == 1 else []

    @property
    def units(self) -> list[str]:
        """Return the units that a head may have; a worker has the first alone."""
        name = self.file.name
        watches = [f"patchkit-{name}-worker@{n}.service" for n in range(1, len(self.file.node))]
        return [self.file.unit, *watches, f"patchkit-{name}-ray.service"]

    def units_of(self, node: Remote) -> list[str]:
        """Return the units that a node may have."""
        return self.units if node == self.head else [self.file.unit]

    def facts(self, models: Sequence[str] = ()) -> list[NodeFacts]:
        """Return the facts of all nodes. Raises the first error of a node, naming the others."""
        return all_of(self.tried_facts(models))

    def tried_facts(self, models: Sequence[str] = ()) -> list[NodeFacts | PatchkitError]:
        """Return the facts of each node, or why there are none."""

        def ask(node: Remote) -> NodeFacts:
            its = {"name": self.file.name, "venv": self.file.venv, "models": list(models)}
            facts = node.call(NodeFacts, node_facts.look_at_node, **its)
            if lacking := set(models) - set(facts.models):
                raise HostError(f"{node.destination}: says nothing of {min(lacking)}")
            return facts

        return everywhere(self.nodes, ask)

    def clocks(self, nodes: Sequence[Remote]) -> list[float | PatchkitError]:
        """Return the seconds that each node's clock is ahead of this machine's."""

        def ask(node: Remote) -> float:
            # As it was sent: what the login and Python take before that is not in it.
            ahead = 0.0 if node.here else node.call(float, time.time) - time.time()
            if abs(ahead) > _LONGEST:
                raise HostError(f"{node.destination}: its clock says nothing")
            return ahead

        return everywhere(nodes, ask)

    def follow(self, units: Sequence[str]) -> Iterator[list[UnitState]]:
        """Yield the states of units of the head, at once and whenever they change."""
        said = self.head.stream(dict[str, list[UnitState]], unit_state.follow_units, units=units)
        for states in said:
            found = states.get("units", [])
            _check_units(self.head, units, found)
            yield found

    def states(self) -> list[NodeState | PatchkitError]:
        """Return the state of each node, or why it is not known."""

        def ask(node: Remote) -> NodeState:
            units = self.units_of(node)
            state = node.call(
                NodeState, unit_state.read_node_state, name=self.file.name, units=units
            )
            _check_units(node, units, state.units)
            return state

        return everywhere(self.nodes, ask)

    def links(self, addresses: Sequence[str]) -> list[PeerLink]:
        """Return how the head reaches each worker, by their addresses on the cable.

        Raises HostError for a worker that it does not reach, with what to do on the head.
        """
        workers = self.file.node[1:]
        if not workers:
            return []
        found = self.try_links(workers, addresses)
        for worker, link in zip(workers, found, strict=True):
            if link.error:
                raise self._not_linked(worker, link)
        return found

    def try_links(self, workers: Sequence[ClusterNode], addresses: Sequence[str]) -> list[PeerLink]:
        """Return how the head reaches some workers, or why it does not."""
        peers = [[it.from_head, address] for it, address in zip(workers, addresses, strict=True)]
        found = self.head.call(list[PeerLink], on_head.try_links, peers=peers)
        if len(found) != len(peers):
            raise HostError(f"{self.head.destination}: does not say how it reaches each worker")
        return found

    def _not_linked(self, worker: ClusterNode, link: PeerLink) -> HostError:
        error = sent_error(link.error, f"from {self.head.destination}")
        why, hint = advice(error.what, worker.from_head)
        if not self.head.here:
            hint = f"on {self.head.destination} ({quoted('ssh', self.head.destination)}): {hint}"
        return HostError(
            error.what,
            why=f"the head starts and watches {worker.ssh} by ssh, without a password; {why}",
            hint=hint,
        )

    def put_files(self, files: Sequence[dict[str, str]]) -> None:
        """Write the files of all nodes, the workers' first. Raises as that does on a node."""
        pairs = list(zip(self.nodes, files, strict=True))

        def write(pair: tuple[Remote, dict[str, str]]) -> None:
            node, its = pair
            node.call(list[str], control.place_files, name=self.file.name, files=its)

        all_of(everywhere(pairs[1:], write))
        write(pairs[0])

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the cluster: no other patchkit changes it meanwhile. Raises BusyError."""
        with contextlib.ExitStack() as stack:
            name = self.file.name
            try:
                stack.enter_context(self.head.opened(bool, node_files.hold_alone, name=name))
            except BusyError as error:
                raise BusyError(
                    error.what,
                    why=f"a launcher loses the cluster after {LEASE:.0f} s of silence",
                    hint="wait until it is done, or end that process there",
                ) from None
            yield


def _check_units(node: Remote, units: Sequence[str], states: Sequence[UnitState]) -> None:
    if [state.unit for state in states] != [*units]:
        raise HostError(f"{node.destination}: does not say how its units are")
