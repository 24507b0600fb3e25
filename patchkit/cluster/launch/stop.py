"""Stop a cluster's group on its nodes, and on nodes that are not in its file any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from patchkit.cluster.agent import node_state
from patchkit.cluster.agent.node_state import NodeState
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.ssh.node import Remote, run_on_all
from patchkit.cluster.ssh.ssh import ssh_command
from patchkit.errors import HostError, PatchkitError


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
