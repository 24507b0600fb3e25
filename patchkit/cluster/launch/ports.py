"""Try the ports that nodes of a cluster need from each other, before a start."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from patchkit.cluster.agent import group_script, links
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.ssh.node import all_of, everywhere
from patchkit.cluster.ssh.ssh import there
from patchkit.errors import HostError

HEAD_PORTS = {
    "mp": {29501: "the rendezvous of the ranks, --master-port"},
    "ray": {6379: "Ray's head"},
}
"""By what starts the ranks: the ports at the head's address, and for what.

torch, gloo and NCCL take others on every node, which the system chooses.
"""


def check_ports(cluster: Cluster, addresses: Sequence[str], executor: str) -> None:
    """Try every port between the head and each worker, both ways.

    Raises HostError for one that is taken, or that a firewall closes.
    """
    nodes = cluster.nodes
    with contextlib.ExitStack() as stack:
        opened: list[list[int]] = []
        for number, (node, address) in enumerate(zip(nodes, addresses, strict=True)):
            ports = [0] if number else [*HEAD_PORTS[executor], 0]
            asked = {"address": address, "ports": ports}
            said = stack.enter_context(node.opened(dict[str, list[int]], links.hold_ports, **asked))
            if taken := said.get("taken"):
                raise HostError(
                    f"{node.destination}: port {taken[0]} at {address} is taken",
                    why="another server, or a rank that was started by hand",
                    hint=there(node.destination, "ss", "-ltnp", "sport", "=", f":{taken[0]}"),
                )
            opened.append(said.get("open", []))

        def try_way(way: tuple[int, int]) -> None:
            here, other = way
            target, asked = nodes[other].destination, {"address": addresses[other]}
            blocked = nodes[here].call(list[int], links.find_blocked, ports=opened[other], **asked)
            if blocked:
                place = f"{addresses[other]}:{blocked[0]}"
                raise HostError(
                    f"{nodes[here].destination} does not reach {target} at {place}",
                    why="a firewall, or a cable that is out; the ranks connect there at many ports",
                    hint=there(target, "sudo", "ufw", "allow", "from", addresses[here]),
                )

        workers = range(1, len(nodes))
        all_of(everywhere([*((0, n) for n in workers), *((n, 0) for n in workers)], try_way))


def check_server_port(cluster: Cluster, url: str) -> None:
    """Raise HostError if another than the unit's own listens where its server is to be asked."""
    head = cluster.head
    for other in head.call(list[str], group_script.strangers, url=url, unit=cluster.file.unit):
        sockets = there(head.destination, "ss", "-ltnp")
        raise HostError(
            f"{head.destination}: the server's port is taken: {other}",
            why="it would answer instead of the model, or every second request",
            hint=f"end it, or set another `port`; who listens: {sockets}",
        )
