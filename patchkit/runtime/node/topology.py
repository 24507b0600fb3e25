"""Choose how a node is attached to its cluster: cage, topology, interfaces and address. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from typing import Literal

from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.host.networks import TwinState, one_half_fills, twin_state
from patchkit.runtime.node.address import cable_refusal, named_address, own_address
from patchkit.runtime.node.fabric import Fabric, find_fabric
from patchkit.runtime.rules.refusals import refusal
from patchkit.runtime.rules.releases import read_env_data


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
    fabric = find_fabric(
        host, nodes, named_address(head) if head or role == "worker" else ""
    )
    chosen = _choose_topology(host, topology, nodes, fabric, target)
    own, address = own_address(host, chosen, role, head, fabric)
    if chosen == "roce":
        attached = _attach_roce(fabric, own, nodes)
    elif chosen == "ring":
        attached = _attach_ring(fabric, own, nodes)
    else:
        attached = Attachment(topology=chosen, data=own.name, netdevs=(own.name,))
    notes = [*attached.notes]
    if chosen == "socket":  # a Thor, which is hetero, has no RDMA
        if not fabric.usable:
            notes.append(
                f"sockets, since no RDMA device is usable here: {fabric.described}"
            )
        elif own not in (port.netdev for port in fabric.usable):
            fast = ", ".join(
                f"{port.device.name} on {port.netdev.name}" for port in fabric.usable
            )
            notes.append(
                f"sockets, as asked for; RoCE could use {fast}: --topology roce"
            )
        # TCP can use both halves of a cage, as RDMA does.
        both = own.twin and twin_state(host, own) in ("both", "link-local")
        attached = replace(
            attached,
            netdevs=(own.name, *([own.twin] if both else [])),
            cages=() if own.cage is None else (own.cage,),
        )
    if IPv4Address(address).is_link_local:
        notes.append(
            f"{address} is link-local and changes at a boot: write this file anew then"
        )
    if others := [str(each.ip) for each in own.ipv4 if str(each.ip) != address]:
        notes.append(f"{own.name} has {', '.join(others)} as well; {address} is taken")
    return replace(attached, address=address, netdev=own.name, notes=tuple(notes))


def _choose_topology(
    host: Host, asked: str, nodes: int, fabric: Fabric, target: str
) -> str:
    if asked in ("roce", "ring") and not fabric.usable:
        raise cable_refusal(host, "no-rdma", topology=asked, devices=fabric.described)
    if asked not in ("auto", "roce"):
        return asked
    if asked == "auto" and (target == "thor" or not fabric.usable):
        return "hetero" if target == "thor" else "socket"
    # Two cages in use, and neither is a switch's: each leads to another neighbour.
    ring = (
        not fabric.ports
        and nodes <= read_env_data("hardware")["connectx"]["ring_nodes"]
    )
    if asked == "auto" and ring:
        return "ring"
    if not fabric.ports:
        first: dict[int | None, str] = {}
        for port in fabric.spanning:
            first.setdefault(
                port.device.cage, f"{port.netdev.ipv4[0].ip} on {port.netdev.name}"
            )
        raise refusal("two-cages", nodes=nodes, cages=" or ".join(first.values()))
    return "roce"


def _attach_roce(fabric: Fabric, own: Netdev, nodes: int) -> Attachment:
    # The control may go over another interface than the data, such as the LAN's.
    port = next((each for each in fabric.ports if each.netdev == own), fabric.ports[0])
    device, data, twin, state = port.device, port.netdev.name, port.twin, port.state
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
        notes.append(
            f"{name} has no second half here: about half of the cable's bandwidth"
        )
    elif state == "down":
        full = one_half_fills(port.netdev.speed)
        cost = "" if full else "; that costs half of the bandwidth"
        its = twin.state or "of unknown state"
        notes.append(
            f"{twin.name}, a half of the cable, is left out: it is {its}{cost}"
        )
    else:
        both = sorted((device, twin), key=lambda rdma: (rdma.pci, rdma.name))
    others = [
        other.device.name for other in fabric.usable if other.device.cage != device.cage
    ]
    if others:
        why = f"all {nodes} nodes are reached over {data}"
        if nodes == 2:
            why = "between two nodes one cable carries all that the ConnectX-7 can"
        notes.append(
            f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} not used: {why}"
        )
    addressed = both if state in ("both", "link-local") else [device]
    return Attachment(
        topology="roce",
        data=data,
        netdevs=tuple(rdma.netdev for rdma in addressed),
        hcas=fabric.exact_names(both),
        half=fabric.exact_names([device]),
        twin=state,
        cages=() if device.cage is None else (device.cage,),
        notes=tuple(notes),
    )


def _attach_ring(fabric: Fabric, own: Netdev, nodes: int) -> Attachment:
    # Not those with a random address beside a twin with a lasting one.
    ports = (
        port for port in fabric.usable if port.netdev.lasting or port.state != "random"
    )
    devices = [port.device for port in ports]
    cages = tuple(sorted({rdma.cage for rdma in devices if rdma.cage is not None}))
    notes = [f"{own.name} carries the bootstrap, the cables carry the data"]
    if nodes == 3:  # luxingcom/aicad-nccl-optimization
        notes.append("in a ring of three each cable must join a port 0 with a port 1")
    if len(cages) < 2:
        notes.append(f"a ring uses both cages of every node; here: {fabric.described}")
    return Attachment(
        topology="ring",
        data=own.name,
        netdevs=(own.name,),
        hcas=fabric.exact_names(devices),
        cages=cages,
        notes=tuple(notes),
    )
