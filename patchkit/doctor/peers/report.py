"""Hold what the nodes of a cluster said when doctor asked them; what a node did not say is None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from patchkit.cluster.agent.examination import ModelPrint, PythonContents, UnitFile
from patchkit.cluster.agent.links import PeerLink, Way
from patchkit.cluster.agent.node_facts import DiskRoom, NodeFacts
from patchkit.cluster.agent.unit_state import GroupProcess, Listener, NodeState
from patchkit.cluster.health.node_health import NodeHealth
from patchkit.doctor.peers.placed_files import PlacedFiles
from patchkit.errors import PatchkitError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """Seconds that a node's clock is ahead of the launcher's, and how wrong that may be."""

    ahead: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a node said. ``silence`` is why it said nothing at all, None if it answered.

    ``address`` is its IPv4 address in the cluster: what it has now, else what cluster.toml or the
    last start say, "" if nobody does; ``no_address`` is why it has none now. ``links`` are how a
    head reaches each worker by ssh, ``ways`` the addresses that a node tried, each with the node
    that has it. ``ports_tried`` says that a head tried the ports between all nodes, ``blocked``
    what was wrong with them. ``placed`` is what the last `up` left, None for nothing. ``missing``
    has the error of each part that the node could not say, by the part's name.
    """

    node: str
    silence: PatchkitError | None = None
    address: str = ""
    no_address: PatchkitError | None = None
    clock: ClockOffset | None = None
    facts: NodeFacts | None = None
    health: NodeHealth | None = None
    state: NodeState | None = None
    unit_file: UnitFile | None = None
    contents: PythonContents | None = None
    processes: tuple[GroupProcess, ...] | None = None
    listeners: tuple[Listener, ...] | None = None
    disks: tuple[DiskRoom, ...] | None = None
    models: tuple[ModelPrint, ...] | None = None
    placed: PlacedFiles | None = None
    links: tuple[PeerLink, ...] | None = None
    ways: tuple[tuple[str, Way], ...] | None = None
    ports_tried: bool = False
    blocked: PatchkitError | None = None
    missing: Mapping[str, PatchkitError] = field(default_factory=dict)

    def why_not(self, part: str) -> str:
        """Return why a part of the report is missing."""
        if self.silence:
            return f"{self.node} did not answer"
        error = self.missing.get(part)
        return error.what if error else "the node did not say"
