"""Find the ports of a host that carry data by RoCE, and the cage that joins it to others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

    def has_room(self, nodes: int) -> bool:
        """Return whether one of its networks has addresses for so many nodes."""
        sizes = [address.network.num_addresses for address in self.netdev.ipv4]
        # Both addresses of a /31 are hosts (RFC 3021).
        return any((size if size <= 2 else size - 2) >= nodes for size in sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The ``usable`` ports of a host, by PCI address, and which of them reach its cluster.

    ``spanning`` are in a network with room for all nodes. ``ports`` are those of the cage that
    joins this node to the others, best first; there are none if two cages could be that one.
    ``names`` are the names of all RDMA devices, and ``described`` says how they are.
    """

    usable: tuple[Port, ...]
    spanning: tuple[Port, ...]
    ports: tuple[Port, ...]
    names: tuple[str, ...]
    described: str

    def exact_names(self, devices: Sequence[Rdma]) -> str:
        """Return names for NCCL, which takes prefixes; ``=`` makes them exact where it matters."""
        names = tuple(rdma.name for rdma in devices)
        unwanted = set(self.names).difference(names)
        is_ambiguous = any(name.startswith(names) for name in unwanted)
        return ("=" if is_ambiguous else "") + ",".join(names)


def find_fabric(host: Host, nodes: int, head: str) -> Fabric:
    """Return the ports for a cluster of so many nodes.

    ``head`` is the head's address, or empty. An address on the LAN does not tell the cage.
    """
    usable = _find_usable_ports(host)
    spanning = _choose_spanning_ports(host, usable, nodes)
    # This host is the head, or it reaches the head by a cable, or nothing tells the cage.
    head_ports = tuple(port for port in usable if port.netdev.has_address(head))
    near = [port for port in spanning if head and in_reach(port.netdev, head)]
    cages = _rank_cages(head_ports or near or spanning)
    if nodes > 2 and len(cages) > 1:
        cages = _find_switch_cage(cages, spanning)

    ports: tuple[Port, ...] = ()
    if cages:
        ports = tuple(port for port in spanning if port.device.cage == cages[0])
        # A port that is not in `spanning` counts if it has the very address that was named.
        ports = ports or head_ports

    states = [
        f"{rdma.name} {rdma.state or 'of unknown state'} on {rdma.netdev or 'nothing'}"
        for rdma in host.rdma
    ]
    return Fabric(
        usable=usable,
        spanning=spanning,
        ports=ports,
        names=tuple(rdma.name for rdma in host.rdma),
        described=", ".join(states) or "no RDMA device",
    )


def _find_usable_ports(host: Host) -> tuple[Port, ...]:
    """Return the active RDMA devices whose interface is up and has an IPv4 address."""
    devices = {rdma.name: rdma for rdma in host.rdma}
    ports = []
    for rdma in sorted(host.rdma, key=lambda rdma: (rdma.pci, rdma.name)):
        netdev = host.netdev(rdma.netdev)
        if rdma.active and netdev and netdev.up and netdev.ipv4:
            twin = devices.get(rdma.twin)
            ports.append(Port(rdma, netdev, twin, twin_state(host, netdev)))
    return tuple(ports)


def _choose_spanning_ports(
    host: Host, usable: tuple[Port, ...], nodes: int
) -> tuple[Port, ...]:
    """Return the ports in a network with room for all nodes, those with a lasting address first.

    Ports that share a network with another interface are left out, unless all of them do.
    """
    roomy = [port for port in usable if port.has_room(nodes)] or usable
    names = {port.netdev.name for port in roomy}
    shared = {overlap.netdev.name for overlap in overlaps(host, names)}
    apart = [port for port in roomy if port.netdev.name not in shared] or roomy
    return tuple(
        sorted(apart, key=lambda port: (not port.netdev.lasting, port.device.pci))
    )


def _rank_cages(ports: Iterable[Port]) -> list[int | None]:
    """Return the cages of ports, best first, without a cage in a network of a better one."""
    cages: list[int | None] = []
    cage_of: dict[IPv4Network, int | None] = {}
    for port in ports:
        cage = port.device.cage
        # Link-local networks do not tell where a cable leads.
        networks = {address.network for address in port.netdev.lasting}
        if any(cage_of.get(network, cage) != cage for network in networks):
            continue

        cage_of |= dict.fromkeys(networks, cage)
        if cage not in cages:
            cages.append(cage)
    return cages


def _find_switch_cage(
    cages: Iterable[int | None], spanning: Iterable[Port]
) -> list[int | None]:
    """Return the one cage that leads to a switch; an empty list for none, or for several.

    A cable between two Sparks has its full speed: a slower cage leads to a switch.
    """
    speeds: dict[int | None, int] = {}
    for port in spanning:
        cage = port.device.cage
        speeds[cage] = max(speeds.get(cage, 0), port.netdev.speed or 0)
    fastest = max(speeds.values(), default=0)
    slower = [cage for cage in cages if 0 < speeds.get(cage, 0) < fastest]
    return slower if len(slower) == 1 else []
