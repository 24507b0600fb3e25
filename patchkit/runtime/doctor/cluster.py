"""Ask all nodes of a cluster side by side, and judge what they say: the first cause first."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from patchkit.errors import PatchkitError
from patchkit.records import RecordError, record
from patchkit.runtime.doctor.node_report import ClockOffset, NodeReport
from patchkit.runtime.doctor.placed_files import placed_group
from patchkit.runtime.host.target import target_of
from patchkit.runtime.launch import ports
from patchkit.runtime.launch.cluster import Cluster
from patchkit.runtime.launch.cluster_file import ClusterFile
from patchkit.runtime.node.topology import attach
from patchkit.runtime.on_node import examination
from patchkit.runtime.on_node.examination import UnitFile
from patchkit.runtime.on_node.group_processes import GroupProcess, Listener
from patchkit.runtime.on_node.links import PeerLink
from patchkit.runtime.on_node.model_print import ModelPrint
from patchkit.runtime.on_node.node_facts import NodeFacts
from patchkit.runtime.on_node.python_contents import PythonContents
from patchkit.runtime.on_node.unit_state import NodeState
from patchkit.runtime.on_node.ways import Way
from patchkit.runtime.remote.everywhere import everywhere
from patchkit.runtime.remote.failure import sent_error
from patchkit.runtime.remote.node import Remote


@dataclass(frozen=True, slots=True, kw_only=True)
class _SentReport:
    """What ``examine`` and ``meet`` send, as far as each of them says it."""

    errors: Mapping[str, Mapping[str, str]]
    began: float = 0.0
    ended: float = 0.0
    facts: NodeFacts | None = None
    contents: PythonContents | None = None
    state: NodeState | None = None
    unit_file: UnitFile | None = None
    processes: tuple[GroupProcess, ...] | None = None
    listeners: tuple[Listener, ...] | None = None
    ways: tuple[Way, ...] | None = None
    links: tuple[PeerLink, ...] | None = None
    model: ModelPrint | None = None


def examined(cluster: Cluster) -> list[NodeReport]:
    """Return what each node says of itself, and then of the others; all are asked side by side.

    Raises nothing for a node that does not answer: its report says why.
    """
    wanted = [cluster.file.serve.port]
    wanted += [each.port for kind in ("mp", "ray") for each in ports.needs(kind) if each.port]

    def ask(node: Remote) -> NodeReport:
        units = cluster.units if node == cluster.head else [cluster.file.unit]
        before = time.time()
        said = node.call(
            examination.examine,
            name=cluster.file.name,
            venv=cluster.file.venv,
            units=units,
            ports=sorted(set(wanted)),
        )
        return _first(node.destination, said, before, time.time())

    reports = _each(cluster, ask)
    reports = _addressed(cluster.file, reports)
    return _met(cluster, reports)
