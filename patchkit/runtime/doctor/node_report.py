"""Hold what the nodes of a cluster said when doctor asked them; what a node did not say is None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from patchkit.errors import PatchkitError
from patchkit.runtime.on_node.examination import UnitFile
from patchkit.runtime.on_node.group_processes import GroupProcess, Listener
from patchkit.runtime.on_node.links import PeerLink
from patchkit.runtime.on_node.model_print import ModelPrint
from patchkit.runtime.on_node.node_facts import NodeFacts
from patchkit.runtime.on_node.python_contents import PythonContents
from patchkit.runtime.on_node.unit_state import NodeState
from patchkit.runtime.on_node.ways import Way


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """Seconds by which a node's clock is ahead of the launcher's, at most ``error`` more or less."""

    ahead: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a node said. ``silence`` is why it said nothing at all, None if it answered.

    ``address`` is its IPv4 address in the cluster, "" if none is known; ``no_address`` says why.
    ``links`` are how a head reaches each worker by ssh, ``ways`` the addresses that it tried, by
    the node that has them. ``missing`` has the error of each part that the node could not say, by
    the part's name.
    """

    node: str
    silence: PatchkitError | None = None
    address: str = ""
    no_address: str = ""
    clock: ClockOffset | None = None
    facts: NodeFacts | None = None
    state: NodeState | None = None
    unit_file: UnitFile | None = None
    contents: PythonContents | None = None
    processes: tuple[GroupProcess, ...] | None = None
    listeners: tuple[Listener, ...] | None = None
    model: ModelPrint | None = None
    links: tuple[PeerLink, ...] | None = None
    ways: tuple[tuple[str, Way], ...] | None = None
    missing: Mapping[str, PatchkitError] = field(default_factory=dict)
