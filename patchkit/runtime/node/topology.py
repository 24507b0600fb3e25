"""Choose how a node is attached to its cluster: cage, topology, interfaces and address.

Ports of a host that can carry data by RoCE count, and the cage that leads to the cluster. Pure:
only the facts of the host decide.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network
from operator import attrgetter
from typing import Literal

from patchkit.errors import PatchkitError
from patchkit.frozen import Texts, frozen
from patchkit.runtime.host.advice import find_remark
from patchkit.runtime.host.host import (
    Host,
    Netdev,
    Rdma,
    TwinState,
    describe_addresses,
    in_reach,
    one_half_fills,
    overlaps,
    twin_state,
)
from patchkit.runtime.rules.releases import read_env_data, refusal


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


# The states of a twin in which both halves have addresses of the same kind.
_ADDRESSED = ("both", "link-local")


@frozen
class Attachment:
    """How a node is attached to its cluster.

    ``address`` is the IPv4 address that the node announces, and ``netdev`` the interface that has
    it; both are "" for a node alone. ``data`` is the interface that carries the data; ``netdevs``
    are all interfaces that can carry data by TCP. ``hcas`` are the RDMA devices in the syntax of
    NCCL_IB_HCA, ``half`` is the one of them that belongs to ``data``. ``twin`` says how the other
    half of that cage is addressed. ``cages`` are the cages in use. ``notes`` tell the user what
    to know about the choice.
    """

    topology: str
    address: str = ""
    netdev: str = ""
    data: str = ""
    netdevs: Texts = ()
    hcas: str = ""
    half: str = ""
    twin: TwinState | Literal[""] = ""
    cages: tuple[int, ...] = ()
    notes: Texts = ()


def choose_attachment(
    host: Host,
    *,
    role: str,
    topology: str,
    nodes: int,
    head: str,
    target: str,
) -> Attachment:
    """Return how a head or a worker is attached.

    ``topology`` may be ``auto``. ``head`` is the head's IPv4 address; it may be "" on the head
    itself. Raises HostError if the hardware is not what the request needs, or if two choices are
    possible; UsageError if ``head`` is no IPv4 address, or is missing for a worker.
    """
    if head or role == "worker":
        check_ipv4(head)

    fabric = find_fabric(host, nodes, head)
    topology = _choose_topology(host, topology, nodes, fabric, target)
    netdev, address = choose_address(host, topology, role, head, fabric)

    match topology:
        case "roce":
            attachment = _attach_roce(fabric, netdev, nodes)
        case "ring":
            attachment = _attach_ring(fabric, netdev, nodes)
        case _:
            attachment = _attach_sockets(host, fabric, netdev, topology)

    notes = [*attachment.notes]
    if IPv4Address(address).is_link_local:
        notes.append(
            f"{address} is link-local and changes at a boot: write this file anew then"
        )
    if unused := ", ".join(ip for ip in netdev.ips if ip != address):
        notes.append(f"{netdev.name} has {unused} as well; {address} is taken")

    return replace(
        attachment,
        address=address,
        netdev=netdev.name,
        notes=tuple(notes),
    )


def _choose_topology(
    host: Host,
    topology: str,
    nodes: int,
    fabric: Fabric,
    target: str,
) -> str:
    """Return the requested topology; for ``auto`` the one that the device and the cables have.

    ``auto`` is hetero for a Thor, socket without a usable RDMA device, and roce or ring otherwise.
    Raises HostError if RoCE or a ring is requested and no RDMA device is usable; or if two cages
    have cables, nobody can tell which of them joins the nodes, and these are no ring.
    """
    if topology == "auto" and target == "thor":
        return "hetero"
    if topology not in ("auto", "roce", "ring"):
        return topology

    if not fabric.usable:
        if topology == "auto":
            return "socket"
        raise cable_refusal(
            host,
            "no-rdma",
            topology=topology,
            devices=fabric.described,
        )
    if topology == "ring":
        return "ring"
    if fabric.ports:
        return "roce"

    # Two cages are in use, and neither is known to lead to a switch. In a ring, each cage leads to
    # a different neighbour.
    largest_ring = read_env_data("hardware")["connectx"]["ring_nodes"]
    if topology == "auto" and nodes <= largest_ring:
        return "ring"

    places: dict[int | None, str] = {}
    for port in fabric.spanning:
        netdev = port.netdev
        places.setdefault(port.cage, f"{netdev.ips[0]} on {netdev.name}")
    cages = " or ".join(places.values())
    raise refusal("two-cages", nodes=nodes, cages=cages)


def _attach_sockets(
    host: Host,
    fabric: Fabric,
    netdev: Netdev,
    topology: str,
) -> Attachment:
    alone = Attachment(topology=topology, data=netdev.name, netdevs=(netdev.name,))
    if topology == "hetero":  # a Thor has no RDMA
        return alone

    note = ""
    if not fabric.usable:
        note = f"sockets, since no RDMA device is usable here: {fabric.described}"
    elif netdev not in [port.netdev for port in fabric.usable]:
        places = [f"{port.device.name} on {port.netdev.name}" for port in fabric.usable]
        fast = ", ".join(places)
        note = f"sockets, as asked for; RoCE could use {fast}: --topology roce"

    # TCP can use both halves of a cage, as RDMA does.
    is_whole = twin_state(host, netdev) in _ADDRESSED
    return replace(
        alone,
        netdevs=(netdev.name, netdev.twin) if is_whole else (netdev.name,),
        cages=() if netdev.cage is None else (netdev.cage,),
        notes=(note,) if note else (),
    )


def _attach_roce(fabric: Fabric, control: Netdev, nodes: int) -> Attachment:
    # The port behind the announced address, if there is one. Control traffic may also use another
    # interface than the data, such as that of the LAN.
    ports = (port for port in fabric.ports if port.netdev == control)
    port = next(ports, fabric.ports[0])
    device = port.device
    state = port.state
    if port.twin is None:
        state = "none"
    elif not port.twin.active:
        state = "down"

    halves = [device]
    if port.twin and state != "down":
        halves = sorted((device, port.twin), key=attrgetter("pci", "name"))
    addressed = halves if state in _ADDRESSED else [device]

    return Attachment(
        topology="roce",
        data=port.netdev.name,
        netdevs=tuple(rdma.netdev for rdma in addressed),
        hcas=fabric.exact_names(halves),
        half=fabric.exact_names([device]),
        twin=state,
        cages=() if device.cage is None else (device.cage,),
        notes=tuple(_note_roce(fabric, port, state, control, nodes)),
    )


def _note_roce(
    fabric: Fabric,
    port: Port,
    state: TwinState,
    control: Netdev,
    nodes: int,
) -> Iterator[str]:
    """Yield notes about the port that carries the data."""
    data = port.netdev.name
    if control.name != data:
        yield (
            f"{control.name} carries the control, the cable behind {data} the data; "
            "sockets for both, on every node: --topology socket"
        )

    if port.twin is None:
        name = port.device.name
        yield f"{name} has no second half here: about half of the cable's bandwidth"
    elif state == "down":
        loses = not one_half_fills(port.netdev.speed)
        cost = "; that costs half of the bandwidth" if loses else ""
        rdma_state = port.twin.state or "of unknown state"
        yield f"{port.twin.name}, a half of the cable, is left out: it is {rdma_state}{cost}"

    devices = [usable.device for usable in fabric.usable]
    unused = [rdma.name for rdma in devices if rdma.cage != port.device.cage]
    if unused:
        verb = "is" if len(unused) == 1 else "are"
        reason = f"all {nodes} nodes are reached over {data}"
        if nodes == 2:
            reason = "between two nodes one cable carries all that the ConnectX-7 can"
        yield f"{', '.join(unused)} {verb} not used: {reason}"


def _attach_ring(fabric: Fabric, control: Netdev, nodes: int) -> Attachment:
    # A device with a random address is left out if its twin has a lasting one.
    devices = [
        port.device
        for port in fabric.usable
        if port.netdev.lasting or port.state != "random"
    ]
    cages = {rdma.cage for rdma in devices if rdma.cage is not None}
    notes = [f"{control.name} carries the bootstrap, the cables carry the data"]
    if nodes == 3:  # source: luxingcom/aicad-nccl-optimization
        notes.append("in a ring of three each cable must join a port 0 with a port 1")
    if len(cages) < 2:
        notes.append(f"a ring uses both cages of every node; here: {fabric.described}")

    return Attachment(
        topology="ring",
        data=control.name,
        netdevs=(control.name,),
        hcas=fabric.exact_names(devices),
        cages=tuple(sorted(cages)),
        notes=tuple(notes),
    )


def choose_address(
    host: Host,
    topology: str,
    role: str,
    head: str,
    fabric: Fabric,
) -> tuple[Netdev, str]:
    """Return the interface and the IPv4 address that this host announces.

    ``head`` is the head's address, "" if the head is to choose one; a worker needs it. Interfaces
    of the fabric are preferred. Raises HostError if no interface has, or reaches, such an address.
    """
    if role == "worker":
        return _worker_address(host, head, fabric)
    if not head:
        return _head_address(host, topology, fabric)
    if netdev := host.netdev_of(head):
        return netdev, head
    raise refusal("head-elsewhere", head=head, has=describe_addresses(host))


def check_ipv4(address: str) -> str:
    """Return the text if it is an IPv4 address. Raises UsageError."""
    try:
        IPv4Address(address)
    except ValueError:
        raise refusal("no-ipv4", head=address) from None
    return address


def cable_refusal(host: Host, key: str, **fields: object) -> PatchkitError:
    """Return the error ``key`` for a missing cable, with a remark about the machine as its cause.

    ``fields`` are filled into the text of the error.
    """
    error = refusal(key, has=describe_addresses(host), **fields)
    cause = find_remark(host, "no-connectx") or find_remark(host, "part-of-master")
    if cause:
        error.what = f"{error.what}\n{cause.what}"
        error.why = cause.why
        error.hint = cause.hint
        if cause.about == "no-connectx":
            error.hint += "; or use the LAN, by sockets: --head-ip ADDRESS"
    return error


def _worker_address(host: Host, head: str, fabric: Fabric) -> tuple[Netdev, str]:
    if host.has_address(head):
        raise refusal("head-here", head=head)

    data_names = {port.netdev.name for port in fabric.ports}
    rdma_names = {port.netdev.name for port in fabric.usable}

    def rank(netdev: Netdev) -> tuple[bool, bool, str, str]:
        # The interface for the data comes first. An RDMA device that the fabric left out comes
        # last, since another interface is in its network. PCI addresses come before names, which
        # depend on udev.
        is_data = netdev.name in data_names
        return not is_data, netdev.name in rdma_names, netdev.pci, netdev.name

    candidates = [
        netdev for netdev in host.netdevs if netdev.up and in_reach(netdev, head)
    ]
    if not candidates:
        raise cable_refusal(host, "no-way-to-head", head=head)

    netdev = min(candidates, key=rank)
    # Of several addresses, take the one that the head reaches without a router.
    return netdev, str(in_reach(netdev, head)[0].ip)


def _head_address(host: Host, topology: str, fabric: Fabric) -> tuple[Netdev, str]:
    # The interfaces whose address a head may announce, best first.
    choices: list[Netdev] = []
    if topology in ("ring", "hetero"):
        # The cables of a ring join neighbours alone, so that only the LAN reaches all nodes. A Thor
        # has no RDMA, so that the LAN comes first there.
        choices += find_lan(host)
    if topology != "ring":
        choices += [port.netdev for port in fabric.ports]
        choices += _find_cabled(host)

    if not choices:
        if topology == "ring":
            raise refusal("ring-without-lan", has=describe_addresses(host))
        raise cable_refusal(host, "no-cable")
    netdev = choices[0]
    # A link-local address is drawn anew at each boot, so any other one is better.
    interface = next(iter(netdev.lasting), netdev.ipv4[0])
    return netdev, str(interface.ip)


def _find_addressed(host: Host) -> list[Netdev]:
    """Return the interfaces that are up and have an IPv4 address, wired ones first."""
    return [
        netdev
        for kind in ("ethernet", "wifi")
        for netdev in host.netdevs
        if netdev.kind == kind and netdev.up and netdev.ipv4
    ]


def find_lan(host: Host) -> list[Netdev]:
    """Return the interfaces without RDMA, wired ones first."""
    return [netdev for netdev in _find_addressed(host) if not host.rdma_of(netdev.name)]


def _find_cabled(host: Host) -> list[Netdev]:
    """Return the interfaces with RDMA or with a named port, those with a lasting address first."""
    cabled = [
        netdev
        for netdev in _find_addressed(host)
        if netdev.port or host.rdma_of(netdev.name)
    ]

    def rank(netdev: Netdev) -> tuple[bool, str, str]:
        return not netdev.lasting, netdev.pci, netdev.name

    return sorted(cabled, key=rank)
