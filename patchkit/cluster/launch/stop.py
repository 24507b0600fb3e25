"""Stop a group, and look whether it is gone: units, processes and memory, on every node."""

from __future__ import annotations

from dataclasses import dataclass

from patchkit.cluster.agent.control import end_group
from patchkit.cluster.agent.unit_state import NodeState
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.ssh.everywhere import everywhere
from patchkit.cluster.ssh.node import Remote
from patchkit.errors import HostError, PatchkitError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedNode:
    """What became of a node: its state afterwards, and its free memory before, in KiB."""

    state: NodeState
    before: int | None

    @property
    def problem(self) -> str:
        """Return what is left of the group, "" for nothing."""
        on = [unit.unit for unit in self.state.units if unit.active not in ("inactive", "failed")]
        if on:
            return f"{', '.join(on)} still runs"
        if self.state.processes:
            return f"processes are left: {', '.join(map(str, self.state.processes))}"
        return ""


def stop_group(cluster: Cluster, *, disable: bool = True) -> list[StoppedNode | PatchkitError]:
    """Stop a whole group, the head first, which stops its workers; then look at every node."""

    def stop(node: Remote) -> StoppedNode:
        asked = {"name": cluster.file.name, "units": cluster.units_of(node), "disable": disable}
        return node.call(StoppedNode, end_group, **asked)

    head, *workers = cluster.nodes
    return [*everywhere([head], stop), *everywhere(workers, stop)]


def check_stopped(cluster: Cluster, results: list[StoppedNode | PatchkitError]) -> None:
    """Raise HostError that names each node where something is left, or that did not answer."""
    trouble = []
    for node, result in zip(cluster.nodes, results, strict=True):
        if isinstance(result, PatchkitError):
            trouble.append(result.what)
        elif result.problem:
            trouble.append(f"{node.destination}: {result.problem}")
    if trouble:
        raise HostError(
            "not stopped everywhere: " + "; ".join(trouble),
            why="a node that did not answer may still hold memory; a rank ends by itself after "
            "15 s without its head, and a head that boots starts all again",
            hint="patchkit cluster down",
        )
