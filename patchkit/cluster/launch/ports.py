"""List the ports that nodes of a cluster need from each other, and try them before a start."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from patchkit.cluster.agent import group_script, links
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.ssh.node import Remote, all_of, everywhere
from patchkit.cluster.ssh.ssh import there
from patchkit.errors import HostError

ANY = 0
"""Stands for a port that the system chooses: torch and NCCL take such ones, on every node."""


@dataclass(frozen=True, slots=True)
class PortNeed:
    """A TCP port that has to be open on a node, and for what; ``head`` alone, or every node."""

    port: int
    what: str
    head: bool = False


def needs(executor: str) -> tuple[PortNeed, ...]:
    """Return what has to be open on the cable, by what starts the ranks."""
    ray = PortNeed(6379, "Ray's head", head=True)
    master = PortNeed(29501, "the rendezvous of the ranks, --master-port", head=True)
    own = PortNeed(ANY, "torch, gloo and NCCL, at ports that the system chooses")
    return (ray if executor == "ray" else master, own)


def check_ports(cluster: Cluster, addresses: Sequence[str], executor: str) -> None:
    """Try every port between the head and each worker, both ways.

    Raises HostError for one that is taken, or that a firewall closes.
    """
    nodes, wanted = cluster.nodes, needs(executor)
    with contextlib.ExitStack() as stack:
        opened: list[list[int]] = []
        for number, (node, address) in enumerate(zip(nodes, addresses, strict=True)):
            ports = [each.port for each in wanted if number == 0 or not each.head]
            asked = {"address": address, "ports": ports}
            listening = node.opened(dict[str, list[int]], links.hold_ports, **asked)
            said = stack.enter_context(listening)
            if taken := said.get("taken"):
                raise _taken_error(node.destination, address, taken[0])
            opened.append(said.get("open", []))
        ways = [(0, n) for n in range(1, len(nodes))] + [(n, 0) for n in range(1, len(nodes))]

        def tried(way: tuple[int, int]) -> None:
            here, other = way
            asked = {"address": addresses[other], "ports": opened[other]}
            if found := nodes[here].call(list[int], links.find_blocked, **asked):
                raise _blocked_error(nodes[here], nodes[other], addresses, way, found[0])

        all_of(everywhere(ways, tried))


def check_server_port(head: Remote, url: str, unit: str) -> None:
    """Raise HostError if another than the unit's own listens where its server is to be asked."""
    for other in head.call(list[str], group_script.strangers, url=url, unit=unit):
        sockets = there(head.destination, "ss", "-ltnp")
        raise HostError(
            f"{head.destination}: the server's port is taken: {other}",
            why="it would answer instead of the model, or every second request",
            hint=f"end it, or set another `port`; who listens: {sockets}",
        )


def _taken_error(node: str, address: str, port: int) -> HostError:
    return HostError(
        f"{node}: port {port} at {address} is taken",
        why="another server, or a rank that was started by hand",
        hint=there(node, "ss", "-ltnp", "sport", "=", f":{port}"),
    )


def _blocked_error(
    here: Remote, target: Remote, addresses: Sequence[str], way: tuple[int, int], port: int
) -> HostError:
    source = addresses[way[0]]
    return HostError(
        f"{here.destination} does not reach {target.destination} at {addresses[way[1]]}:{port}",
        why="a firewall, or a cable that is out; the ranks connect there at many ports",
        hint=there(target.destination, "sudo", "ufw", "allow", "from", source),
    )
