"""Find the ports of a host that carry data by RoCE, and the cage that joins it to others. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network

from patchkit.runtime.host.host import Host, Netdev, Rdma
from patchkit.runtime.host.networks import TwinState, in_reach, overlaps, twin_state


@dataclass(frozen=True, slots=True)
class Port:
    """An active RDMA device that RoCE v2 can address by IPv4, its interface and its other half."""

    device: Rdma
    netdev: Netdev
    twin: Rdma | None
    state: TwinState  # of the other half's interface


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The ``usable`` ports of a host, by PCI address, and which of them reach its cluster.

    ``spanning`` are in a network with room for all nodes, ``ports`` those of the cage that joins
    this node to the others, best first: none where each of two cages may be meant. ``names`` are
    those of all RDMA devices, and ``described`` says how they are.
    """

    usable: tuple[Port, ...]
    spanning: tuple[Port, ...]
    ports: tuple[Port, ...]
    names: tuple[str, ...]
    described: str

    def exact_names(self, devices: Sequence[Rdma]) -> str:
        """Return names for NCCL, which takes prefixes; ``=`` makes them exact where it matters."""
        names = tuple(rdma.name for rdma in devices)
        exact = any(
            other.startswith(names) for other in self.names if other not in names
        )
        return ("=" if exact else "") + ",".join(names)


def find_fabric(host: Host, nodes: int, head: str) -> Fabric:
    """Return the ports for a cluster of so many nodes.

    ``head`` is the head's address, or empty; one on the LAN says nothing about the cage.
    """
    addressed = {
        netdev.name: netdev for netdev in host.netdevs if netdev.up and netdev.ipv4
    }
    devices = {rdma.name: rdma for rdma in host.rdma}
    usable = tuple(
        Port(rdma, netdev, devices.get(rdma.twin), twin_state(host, netdev))
        for rdma in sorted(host.rdma, key=lambda rdma: (rdma.pci, rdma.name))
        if rdma.active and (netdev := addressed.get(rdma.netdev))
    )
    roomy = []
    for port in usable:
        sizes = (own.network.num_addresses for own in port.netdev.ipv4)
        # Both addresses of a /31 are hosts (RFC 3021).
        if any((size if size <= 2 else size - 2) >= nodes for size in sizes):
            roomy.append(port)
    found = roomy or usable
    shared = {
        each.netdev.name
        for each in overlaps(host, {port.netdev.name for port in found})
    }
    apart = [port for port in found if port.netdev.name not in shared] or found
    spanning = tuple(
        sorted(apart, key=lambda port: (not port.netdev.lasting, port.device.pci))
    )
    own = [
        port
        for port in usable
        if any(str(each.ip) == head for each in port.netdev.ipv4)
    ]
    near = [port for port in spanning if head and in_reach(port.netdev, head)]
    # The cages, best first, without those in a network that a better one is in.
    known: dict[int | None, set[IPv4Network]] = {}
    for port in own or near or spanning:
        # Link-local networks say nothing of where a cable leads.
        networks = {address.network for address in port.netdev.lasting}
        cage = port.device.cage
        others = set().union(*(its for other, its in known.items() if other != cage))
        if not networks & others:
            known.setdefault(cage, set()).update(networks)
    cages = [*known]
    if len(cages) > 1 and nodes > 2:
        # A cable between two Sparks has its full speed: a slower cage leads to a switch.
        speeds = dict.fromkeys(cages, 0)
        for port in spanning:
            cage = port.device.cage
            speeds[cage] = max(speeds[cage], port.netdev.speed or 0)
        cages = [cage for cage in cages if 0 < speeds[cage] < max(speeds.values())]
        if len(cages) != 1:
            cages, own = [], []
    # What was left out of `spanning` is taken where it has the very address that was named.
    ports = tuple(port for port in spanning if port.device.cage in cages[:1]) or tuple(
        own
    )
    states = [
        f"{rdma.name} {rdma.state or 'of unknown state'} on {rdma.netdev or 'nothing'}"
        for rdma in host.rdma
    ]
    return Fabric(
        usable=usable,
        spanning=spanning,
        ports=ports,
        names=tuple(devices),
        described=", ".join(states) or "no RDMA device",
    )
