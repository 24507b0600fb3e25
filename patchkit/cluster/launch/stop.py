"""Stop a group, and look whether it is gone: units, processes and memory, on every node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from patchkit.cluster.agent.control import end
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
        running = [
            each.unit for each in self.state.units if each.active not in ("inactive", "failed")
        ]
        if running:
            return f"{', '.join(running)} still runs"
        if self.state.processes:
            return f"processes are left: {', '.join(map(str, self.state.processes))}"
        return ""


def stopped(
    cluster: Cluster, *, disable: bool = True, tell: Callable[[str], None] = lambda _text: None
) -> list[StoppedNode | PatchkitError]:
    """Stop a whole group, the head first, which stops its workers; then look at every node."""

    def stop(node: Remote) -> StoppedNode:
        units = cluster.units if node == cluster.head else [cluster.file.unit]
        tell(node.destination)
        asked = {"name": cluster.file.name, "units": units, "disable": disable}
        return node.call(StoppedNode, end, **asked)

    first, *workers = cluster.nodes
    head = everywhere([first], stop)
    return [*head, *everywhere(workers, stop)]


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
