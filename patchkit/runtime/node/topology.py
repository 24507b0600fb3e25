"""Choose how a node is attached to its cluster: cage, topology, interfaces and address. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv4Network
from typing import Literal

from patchkit.errors import HostError
from patchkit.runtime.host import hardware
from patchkit.runtime.host.host import Host, Netdev, Rdma
from patchkit.runtime.host.networks import (
    Port,
    TwinState,
    describe_devices,
    in_reach,
    overlaps,
    twin_state,
    usable_ports,
)
from patchkit.runtime.node.address import PLAN, lacking, named_address, own_address


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """``address`` and ``netdev`` are this node's own, empty for a node alone.

    ``data`` is the interface that carries the data, ``netdevs`` are all that do by TCP; ``hcas``
    are the RDMA devices in NCCL's syntax, ``half`` the one behind ``data`` alone. ``twin`` is how
    its other half is addressed, ``cages`` are those that are used, ``notes`` what a user should
    know about the choice.
    """

    topology: str
    address: str = ""
    netdev: str = ""
    data: str = ""
    netdevs: tuple[str, ...] = ()
    hcas: str = ""
    half: str = ""
    twin: TwinState | Literal[""] = ""
    cages: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def attach(
    host: Host, *, role: str, topology: str, nodes: int, head: str, target: str
) -> Attachment:
    """Return how a head or a worker is attached.

    ``topology`` may be ``auto``; ``head`` is the head's IPv4 address, which the head itself may
    leave empty. Raises HostError if the hardware is not what the request needs, or if it can be
    meant in two ways, UsageError without a head.
    """
    ports = fabric(host, nodes, named_address(head) if head else "")
    chosen = _choose_topology(host, topology, nodes, ports, target)
    own, address = own_address(host, chosen, role, head, ports)
    if chosen == "roce":
        attached = _attach_roce(host, own, nodes, ports)
    elif chosen == "ring":
        attached = _attach_ring(host, own, nodes)
    else:
        attached = Attachment(topology=chosen, data=own.name, netdevs=(own.name,))
    notes = [*attached.notes]
    if chosen == "socket":  # a Thor, which is hetero, has no RDMA
        usable = usable_ports(host)
        if not usable:
            notes.append(f"sockets, since no RDMA device is usable here: {describe_devices(host)}")
        elif own not in (port.netdev for port in usable):
            fast = ", ".join(f"{port.device.name} on {port.netdev.name}" for port in usable)
            notes.append(f"sockets, as asked for; RoCE could use {fast}: --topology roce")
        # TCP can use both halves of a cage, as RDMA does.
        both = own.twin and twin_state(host, own) in ("both", "link-local")
        attached = replace(
            attached,
            netdevs=(own.name, *([own.twin] if both else [])),
            cages=() if own.cage is None else (own.cage,),
        )
    if IPv4Address(address).is_link_local:
        notes.append(f"{address} is link-local and changes at a boot: write this file anew then")
    if others := [str(each.ip) for each in own.ipv4 if str(each.ip) != address]:
        notes.append(f"{own.name} has {', '.join(others)} as well; {address} is taken")
    return replace(attached, address=address, netdev=own.name, notes=tuple(notes))


def _choose_topology(host: Host, asked: str, nodes: int, ports: Sequence[Port], target: str) -> str:
    usable = usable_ports(host)
    if asked in ("roce", "ring") and not usable:
        raise lacking(
            host,
            f"{asked} needs an RDMA device that is active and has an IPv4 address; "
            f"here: {describe_devices(host)}",
            why="the cable is out, the interface has no address, or, in a container, "
            "/dev/infiniband is missing",
            hint=f"see `patchkit probe`; {PLAN}; or sockets on every node, the head "
            "first: --topology socket",
        )
    if asked not in ("auto", "roce"):
        return asked
    if asked == "auto" and (target == "thor" or not usable):
        return "hetero" if target == "thor" else "socket"
    # Two cages in use, and neither is a switch's: each leads to another neighbour.
    ring = not ports and nodes <= hardware.facts()["connectx"]["ring_nodes"]
    if asked == "auto" and ring:
        return "ring"
    if not ports:
        first: dict[int | None, str] = {}
        for port in _spanning_ports(host, usable, nodes):
            first.setdefault(port.device.cage, f"{port.netdev.ipv4[0].ip} on {port.netdev.name}")
        raise HostError(
            f"two cages are in use, and nothing says which one joins {nodes} nodes: "
            f"{' or '.join(first.values())}",
            why="a switch joins all nodes in one network; in a ring each cage leads to another "
            "node",
            hint="name the head's address in the network that all nodes share: --head-ip ADDRESS; "
            "if it is a ring: --topology ring",
        )
    return "roce"


def _attach_roce(host: Host, own: Netdev, nodes: int, ports: Sequence[Port]) -> Attachment:
    # The control may go over another interface than the data, such as the LAN's.
    port = next((each for each in ports if each.netdev == own), ports[0])
    device, data = port.device, port.netdev.name
    twin = next((rdma for rdma in host.rdma if rdma.name == device.twin), None)
    state: TwinState = twin_state(host, port.netdev)
    if twin is None or not twin.active:
        state = "none" if twin is None else "down"
    notes = []
    if own.name != data:
        notes.append(
            f"{own.name} carries the control, the cable behind {data} the data; "
            "sockets for both, on every node: --topology socket"
        )
    both = [device]
    if twin is None:
        name = device.name
        notes.append(f"{name} has no second half here: about half of the cable's bandwidth")
    elif state == "down":
        full = hardware.one_half_fills(port.netdev.speed)
        cost = "" if full else "; that costs half of the bandwidth"
        its = twin.state or "of unknown state"
        notes.append(f"{twin.name}, a half of the cable, is left out: it is {its}{cost}")
    else:
        both = sorted((device, twin), key=lambda rdma: (rdma.pci, rdma.name))
    others = [other.device.name for other in usable_ports(host) if other.device.cage != device.cage]
    if others:
        why = f"all {nodes} nodes are reached over {data}"
        if nodes == 2:
            why = "between two nodes one cable carries all that the ConnectX-7 can"
        notes.append(f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} not used: {why}")
    addressed = both if state in ("both", "link-local") else [device]
    return Attachment(
        topology="roce",
        data=data,
        netdevs=tuple(rdma.netdev for rdma in addressed),
        hcas=_exact_names(host, both),
        half=_exact_names(host, [device]),
        twin=state,
        cages=() if device.cage is None else (device.cage,),
        notes=tuple(notes),
    )


def _attach_ring(host: Host, own: Netdev, nodes: int) -> Attachment:
    # Not those with a random address beside a twin with a lasting one.
    usable = [
        port.device
        for port in usable_ports(host)
        if port.netdev.lasting or twin_state(host, port.netdev) != "random"
    ]
    cages = tuple(sorted({rdma.cage for rdma in usable if rdma.cage is not None}))
    notes = [f"{own.name} carries the bootstrap, the cables carry the data"]
    if nodes == 3:  # luxingcom/aicad-nccl-optimization
        notes.append("in a ring of three each cable must join a port 0 with a port 1")
    if len(cages) < 2:
        notes.append(f"a ring uses both cages of every node; here: {describe_devices(host)}")
    return Attachment(
        topology="ring",
        data=own.name,
        netdevs=(own.name,),
        hcas=_exact_names(host, usable),
        cages=cages,
        notes=tuple(notes),
    )


def _exact_names(host: Host, devices: Sequence[Rdma]) -> str:
    """Return names for NCCL, which takes prefixes; ``=`` makes them exact where that matters."""
    names = tuple(rdma.name for rdma in devices)
    others = [rdma.name for rdma in host.rdma if rdma.name not in names]
    exact = any(other.startswith(names) for other in others)
    return ("=" if exact else "") + ",".join(names)


def fabric(host: Host, nodes: int, head: str) -> tuple[Port, ...]:
    """Return the ports of the cage that joins this node to the others, best first.

    ``head`` is the head's address, or empty; one on the LAN says nothing about the cage. Returns
    nothing where no device is usable, or where each of two cages may be meant.
    """
    ports = usable_ports(host)
    spanning = _spanning_ports(host, ports, nodes)
    own = [port for port in ports if any(str(each.ip) == head for each in port.netdev.ipv4)]
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
            return ()
    # What was left out of `spanning` is taken where it has the very address that was named.
    return tuple(port for port in spanning if port.device.cage in cages[:1]) or tuple(own)


def _spanning_ports(host: Host, ports: Sequence[Port], nodes: int) -> list[Port]:
    """Return the ports whose network has room for the nodes, else all; lasting addresses first."""
    roomy = []
    for port in ports:
        sizes = (own.network.num_addresses for own in port.netdev.ipv4)
        # Both addresses of a /31 are hosts (RFC 3021).
        if any((size if size <= 2 else size - 2) >= nodes for size in sizes):
            roomy.append(port)
    found = roomy or list(ports)
    shared = {each.netdev.name for each in overlaps(host, {port.netdev.name for port in found})}
    apart = [port for port in found if port.netdev.name not in shared] or found
    return sorted(apart, key=lambda port: (not port.netdev.lasting, port.device.pci))
