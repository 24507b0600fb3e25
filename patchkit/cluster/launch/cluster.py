"""Ask and change a whole cluster: every node at once, over ssh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from patchkit.cluster.agent import control, node_facts, node_files, unit_state
from patchkit.cluster.agent import links as on_head
from patchkit.cluster.agent.links import PeerLink
from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.agent.unit_state import NodeState, UnitState
from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.ssh.answer import LEASE
from patchkit.cluster.ssh.node import Remote, all_of, everywhere
from patchkit.cluster.ssh.ssh import sent_error, there
from patchkit.errors import BusyError, HostError, PatchkitError


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

    def units_of(self, node: Remote) -> list[str]:
        """Return the units that a node may have."""
        return self.units if node == self.head else [self.file.unit]

    def facts(self, models: Sequence[str] = ()) -> list[NodeFacts]:
        """Return the facts of all nodes. Raises the first error of a node, naming the others."""
        asked = {"name": self.file.name, "venv": self.file.venv, "models": list(models)}

        def ask(node: Remote) -> NodeFacts:
            facts = node.call(NodeFacts, node_facts.look_at_node, **asked)
            if lacking := set(models) - set(facts.models):
                raise HostError(f"{node.destination}: says nothing of {min(lacking)}")
            return facts

        return all_of(everywhere(self.nodes, ask))

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
            asked = {"name": self.file.name, "units": self.units_of(node)}
            state = node.call(NodeState, unit_state.read_node_state, **asked)
            _check_units(node, self.units_of(node), state.units)
            return state

        return everywhere(self.nodes, ask)

    def links(self, addresses: Sequence[str]) -> list[PeerLink]:
        """Return how the head reaches each worker, by their addresses on the cable.

        Raises HostError for a worker that it does not reach, with the command that tries it.
        """
        workers, name = self.file.node[1:], self.head.destination
        peers = [[it.from_head, address] for it, address in zip(workers, addresses, strict=True)]
        found = self.head.call(list[PeerLink], on_head.try_links, peers=peers) if peers else []
        if len(found) != len(peers):
            raise HostError(f"{name}: does not say how it reaches each worker")
        for worker, link in zip(workers, found, strict=True):
            if link.error:
                raise HostError(
                    sent_error(link.error, f"from {name}").what,
                    why=f"the head starts and watches {worker.ssh} by ssh, without a password",
                    hint=there(name, "ssh", worker.from_head),
                )
        return found

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
            try:
                held = self.head.opened(bool, node_files.hold_alone, name=self.file.name)
                stack.enter_context(held)
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
