"""Find the ports of a host that carry data by RoCE, and the cage that joins it to others. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from operator import attrgetter

from patchkit.frozen import frozen
from patchkit.runtime.host.host import Host, Netdev, Rdma
from patchkit.runtime.host.networks import TwinState, in_reach, overlaps, twin_state


@dataclass(frozen=True, slots=True)
class Port:
    """An active RDMA device that RoCE v2 can address by IPv4, its interface and its other half."""

    device: Rdma
    netdev: Netdev
    twin: Rdma | None
    state: TwinState  # of the other half's interface

    @property
    def cage(self) -> int | None:
        return self.device.cage

    def has_room(self, nodes: int) -> bool:
        """Return whether one of its networks has addresses for so many nodes."""
        return any(_count_hosts(network) >= nodes for network in self.netdev.networks)


def _count_hosts(network: IPv4Network) -> int:
    size = network.num_addresses
    # Both addresses of a /31 are hosts (RFC 3021).
    return size if size <= 2 else size - 2


@frozen
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

    return Fabric(
        usable=usable,
        spanning=spanning,
        ports=_choose_ports(usable, spanning, nodes, head),
        names=tuple(rdma.name for rdma in host.rdma),
        described=_describe_devices(host),
    )


def _describe_devices(host: Host) -> str:
    states = []
    for rdma in host.rdma:
        state = rdma.state or "of unknown state"
        netdev = rdma.netdev or "nothing"
        states.append(f"{rdma.name} {state} on {netdev}")
    return ", ".join(states) or "no RDMA device"


def _find_usable_ports(host: Host) -> tuple[Port, ...]:
    """Return the active RDMA devices whose interface is up and has an IPv4 address."""
    devices = {rdma.name: rdma for rdma in host.rdma}
    addressed = {
        netdev.name: netdev for netdev in host.netdevs if netdev.up and netdev.ipv4
    }

    ports = []
    for rdma in sorted(host.rdma, key=attrgetter("pci", "name")):
        netdev = addressed.get(rdma.netdev)
        if rdma.active and netdev:
            port = Port(
                device=rdma,
                netdev=netdev,
                twin=devices.get(rdma.twin),
                state=twin_state(host, netdev),
            )
            ports.append(port)
    return tuple(ports)


def _choose_spanning_ports(
    host: Host,
    usable: tuple[Port, ...],
    nodes: int,
) -> tuple[Port, ...]:
    """Return the ports in a network with room for all nodes, those with a lasting address first.

    Ports that share a network with another interface are left out, unless all of them do.
    """
    roomy = [port for port in usable if port.has_room(nodes)]
    candidates = roomy or usable

    names = {port.netdev.name for port in candidates}
    shared = {overlap.netdev.name for overlap in overlaps(host, names)}
    apart = [port for port in candidates if port.netdev.name not in shared]

    def rank(port: Port) -> tuple[bool, str]:
        return not port.netdev.lasting, port.device.pci

    return tuple(sorted(apart or candidates, key=rank))


def _choose_ports(
    usable: tuple[Port, ...],
    spanning: tuple[Port, ...],
    nodes: int,
    head: str,
) -> tuple[Port, ...]:
    """Return the ports of the cage that joins the nodes; none if two cages could be that one."""
    # This host is the head, or it reaches the head by a cable, or nothing tells the cage.
    head_ports = tuple(port for port in usable if head in port.netdev.ips)
    near_ports = [port for port in spanning if head and in_reach(port.netdev, head)]
    cages = _rank_cages(head_ports or near_ports or spanning)
    if nodes > 2 and len(cages) > 1:
        cages = _find_switch_cage(cages, spanning)
    if not cages:
        return ()

    ports = tuple(port for port in spanning if port.cage == cages[0])
    # A port that is not in `spanning` counts if it has the very address that was named.
    return ports or head_ports


def _rank_cages(ports: Iterable[Port]) -> list[int | None]:
    """Return the cages of ports, best first, without a cage in a network of a better one."""
    cages: dict[int | None, None] = {}
    cage_of: dict[IPv4Network, int | None] = {}
    for port in ports:
        cage = port.cage

        # Link-local networks do not tell where a cable leads.
        networks = {address.network for address in port.netdev.lasting}
        if any(cage_of.get(network, cage) != cage for network in networks):
            continue

        cage_of |= dict.fromkeys(networks, cage)
        cages[cage] = None
    return list(cages)


def _find_switch_cage(
    cages: Iterable[int | None], spanning: Iterable[Port]
) -> list[int | None]:
    """Return the one cage that leads to a switch; an empty list for none, or for several.

    A cable between two Sparks has its full speed: a slower cage leads to a switch.
    """
    speeds: dict[int | None, int] = defaultdict(int)
    for port in spanning:
        speeds[port.cage] = max(speeds[port.cage], port.netdev.speed or 0)
    fastest = max(speeds.values(), default=0)

    slower = [cage for cage in cages if 0 < speeds[cage] < fastest]
    return slower if len(slower) == 1 else []
