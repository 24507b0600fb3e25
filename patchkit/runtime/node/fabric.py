"""Find the ports of a host that can carry data by RoCE, and the cage that leads to the cluster.

Pure: only the facts of the host decide.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network
from operator import attrgetter

from patchkit.frozen import Texts, frozen
from patchkit.runtime.host.host import (
    Host,
    Netdev,
    Rdma,
    TwinState,
    in_reach,
    overlaps,
    twin_state,
)


@frozen
class Port:
    """An active RDMA device whose interface ``netdev`` has an IPv4 address, as RoCE v2 needs.

    ``twin`` is the RDMA device of the other half of the cage; ``state`` says how the interface of
    that half is addressed.
    """

    device: Rdma
    netdev: Netdev
    twin: Rdma | None
    state: TwinState

    @property
    def cage(self) -> int | None:
        return self.device.cage

    def has_room(self, nodes: int) -> bool:
        """Return whether one of the interface's networks has addresses for this number of nodes."""
        return any(_count_hosts(network) >= nodes for network in self.netdev.networks)


Ports = tuple[Port, ...]


def _count_hosts(network: IPv4Network) -> int:
    size = network.num_addresses
    # Both addresses of a /31 are hosts (RFC 3021).
    return size if size <= 2 else size - 2


@frozen
class Fabric:
    """The ports of a host, and the choice among them.

    ``usable`` are all its ports, in the order of PCI addresses. ``spanning`` are the candidates for
    the data, best first: ports in a network that can span the cluster, since it has an address for
    each node (see ``_choose_spanning_ports``). ``ports`` are the spanning ports of the one cage
    that joins this node to the others; empty if there is no such cage, or if several cages could be
    it. ``names`` are the names of all RDMA devices, and ``described`` is a text with their states.
    """

    usable: Ports
    spanning: Ports
    ports: Ports
    names: Texts
    described: str

    def exact_names(self, devices: Sequence[Rdma]) -> str:
        """Return the names of devices for NCCL_IB_HCA: ``mlx5_0,mlx5_1`` or ``=mlx5_0,mlx5_1``.

        NCCL takes each name as a prefix. ``=`` makes names exact, and is written only if a name is
        also the prefix of a device that is not wanted.
        """
        names = tuple(rdma.name for rdma in devices)
        unwanted = set(self.names).difference(names)
        is_ambiguous = any(name.startswith(names) for name in unwanted)
        return ("=" if is_ambiguous else "") + ",".join(names)


def find_fabric(host: Host, nodes: int, head_address: str) -> Fabric:
    """Return the ports of a host for a cluster of this number of nodes.

    ``head_address`` is the IPv4 address of the head, "" if it is not known. It tells which cage
    leads to the head, unless it is an address on the LAN.
    """
    usable = _find_usable_ports(host)
    spanning = _choose_spanning_ports(host, usable, nodes)

    return Fabric(
        usable=usable,
        spanning=spanning,
        ports=_choose_ports(usable, spanning, nodes, head_address),
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


def _find_usable_ports(host: Host) -> Ports:
    """Return a port for each active RDMA device whose interface is up and has an IPv4 address."""
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
    usable: Ports,
    nodes: int,
) -> Ports:
    """Return the ports that can carry the data of all nodes, those with a lasting address first.

    These are the ports in a network that has an address for each node; all usable ports if none is
    in such a network. A port whose network also has another interface of this host is left out,
    unless that leaves no port.
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
    usable: Ports,
    spanning: Ports,
    nodes: int,
    head_address: str,
) -> Ports:
    """Return the ports of the one cage that joins this node to the others, best first.

    The head takes the cage that has ``head_address``, and a worker the cage that reaches it. If no
    cage does, all cages with spanning ports are candidates. Among several cages, two nodes take the
    best one: one cable carries all that the ConnectX-7 can. More nodes take the cage that leads to
    a switch; nothing is returned if that cage is not known.
    """
    head_ports = tuple(port for port in usable if head_address in port.netdev.ips)
    near_ports = []
    if head_address:
        near_ports = [port for port in spanning if in_reach(port.netdev, head_address)]

    cages = _rank_cages(head_ports or near_ports or spanning)
    if nodes > 2 and len(cages) > 1:
        cages = _find_switch_cage(cages, spanning)
    if not cages:
        return ()

    ports = tuple(port for port in spanning if port.cage == cages[0])
    # The user named the head's address: its port counts even if it is not in `spanning`.
    return ports or head_ports


def _rank_cages(ports: Iterable[Port]) -> list[int | None]:
    """Return the cages of ports, in the order of the ports.

    A cage that is in the same network as an earlier one is left out.
    """
    cages: dict[int | None, None] = {}
    cage_of: dict[IPv4Network, int | None] = {}
    for port in ports:
        cage = port.cage

        # Link-local addresses do not count: all links have them, wherever their cables lead.
        networks = {address.network for address in port.netdev.lasting}
        if any(cage_of.get(network, cage) != cage for network in networks):
            continue

        cage_of |= dict.fromkeys(networks, cage)
        cages[cage] = None
    return list(cages)


def _find_switch_cage(
    cages: Iterable[int | None], spanning: Iterable[Port]
) -> list[int | None]:
    """Return a list of the one cage that leads to a switch; an empty list for none or several.

    A cable between two Sparks runs at full speed, so a cage that is slower than the fastest one
    leads to a switch.
    """
    speeds: dict[int | None, int] = defaultdict(int)
    for port in spanning:
        speeds[port.cage] = max(speeds[port.cage], port.netdev.speed or 0)
    fastest = max(speeds.values(), default=0)

    slower = [cage for cage in cages if 0 < speeds[cage] < fastest]
    return slower if len(slower) == 1 else []
