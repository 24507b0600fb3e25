"""Choose how a node is attached to its cluster: topology, interfaces and address.

Pure: the facts of one host and what was asked for in, one answer or one error out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from typing import Literal

from patchkit.runtime.host import hardware
from patchkit.runtime.host.host import Host, Netdev, Rdma
from patchkit.runtime.host.networks import TwinState, twin_state
from patchkit.runtime.node.address import (
    PLAN,
    OwnAddress,
    devices_of,
    lacking,
    named_address,
    own_address,
    usable_rdma,
)
from patchkit.runtime.node.fabric import check_chosen, fabric


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
    head = named_address(head) if head else ""
    devices = fabric(host, nodes, head)
    chosen = _choose_topology(host, topology, nodes, devices, target)
    own = own_address(host, chosen, role, head, devices)
    attached = _ATTACHERS[chosen](host, own, nodes, devices)
    return replace(
        attached,
        topology=chosen,
        address=own.address,
        netdev=own.netdev.name,
        notes=(*attached.notes, *_address_notes(own)),
    )


def _choose_topology(
    host: Host, asked: str, nodes: int, devices: Sequence[Rdma], target: str
) -> str:
    usable = usable_rdma(host)
    if asked in ("roce", "ring") and not usable:
        raise lacking(
            host,
            f"{asked} needs an RDMA device that is active and has an IPv4 address; "
            f"here: {devices_of(host)}",
            why="the cable is out, the interface has no address, or, in a container, "
            "/dev/infiniband is missing",
            hint=f"see `patchkit probe`; {PLAN}; or sockets on every node, the head "
            "first: --topology socket",
        )
    if asked == "roce":
        check_chosen(host, nodes, devices)
    if asked != "auto":
        return asked
    if target == "thor":
        return "hetero"
    if not usable:
        return "socket"
    # Two cages in use, and neither is a switch's: each leads to another neighbour.
    if not devices and nodes <= hardware.facts()["connectx"]["ring_nodes"]:
        return "ring"
    check_chosen(host, nodes, devices)
    return "roce"


def _address_notes(own: OwnAddress) -> Iterator[str]:
    if IPv4Address(own.address).is_link_local:
        yield f"{own.address} is link-local and changes at a boot: write this file anew then"
    others = [str(each.ip) for each in own.netdev.ipv4 if str(each.ip) != own.address]
    if others:
        yield f"{own.netdev.name} has {', '.join(others)} as well; {own.address} is taken"


def _attach_roce(host: Host, own: OwnAddress, nodes: int, devices: Sequence[Rdma]) -> Attachment:
    # The control may go over another interface than the data, such as the LAN's.
    device = next((each for each in devices if each.netdev == own.netdev.name), devices[0])
    netdev = host.netdev(device.netdev) or own.netdev
    twin = next((each for each in host.rdma if each.name == device.twin), None)
    state: TwinState = twin_state(host, netdev)
    if twin is None:
        state = "none"
    elif not twin.active:
        state = "down"
    cage = sorted(filter(None, (device, twin)), key=lambda each: (each.pci, each.name))
    both = [each for each in cage if each is device or state not in ("none", "down")]
    addressed = [each.netdev for each in both if state in ("both", "link-local") or each is device]
    hcas = _exact_names(host, [each.name for each in both])
    return Attachment(
        topology="roce",
        data=device.netdev,
        netdevs=tuple(addressed),
        hcas=hcas,
        half=_exact_names(host, [device.name]),
        twin=state,
        cages=_cage_numbers([device]),
        notes=(
            *_control_notes(own, device),
            *_twin_notes(device, twin, netdev, state),
            *_other_cage_notes(host, device, nodes),
        ),
    )


def _control_notes(own: OwnAddress, device: Rdma) -> Iterator[str]:
    if own.netdev.name != device.netdev:
        yield (
            f"{own.netdev.name} carries the control, the cable behind {device.netdev} the data; "
            "sockets for both, on every node: --topology socket"
        )


def _twin_notes(device: Rdma, twin: Rdma | None, netdev: Netdev, state: TwinState) -> Iterator[str]:
    if twin is None:
        yield f"{device.name} has no second half here: about half of the cable's bandwidth"
    elif state == "down":
        full = hardware.one_half_fills(netdev.speed)
        cost = "" if full else "; that costs half of the bandwidth"
        seen = twin.state or "of unknown state"
        yield f"{twin.name}, a half of the cable, is left out: it is {seen}{cost}"


def _other_cage_notes(host: Host, device: Rdma, nodes: int) -> Iterator[str]:
    others = [each.name for each in usable_rdma(host) if each.cage != device.cage]
    if others:
        why = (
            "between two nodes one cable carries all that the ConnectX-7 can"
            if nodes == 2
            else f"all {nodes} nodes are reached over {device.netdev}"
        )
        yield f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} not used: {why}"


def _attach_ring(host: Host, own: OwnAddress, nodes: int, _devices: Sequence[Rdma]) -> Attachment:
    usable = [each for each in usable_rdma(host) if not _is_random(host, each)]
    notes = [f"{own.netdev.name} carries the bootstrap, the cables carry the data"]
    if nodes == 3:  # luxingcom/aicad-nccl-optimization
        notes.append("in a ring of three each cable must join a port 0 with a port 1")
    if len(_cage_numbers(usable)) < 2:
        notes.append(f"a ring uses both cages of every node; here: {devices_of(host)}")
    return Attachment(
        topology="ring",
        data=own.netdev.name,
        netdevs=(own.netdev.name,),
        hcas=_exact_names(host, [each.name for each in usable]),
        cages=_cage_numbers(usable),
        notes=tuple(notes),
    )


def _is_random(host: Host, device: Rdma) -> bool:
    """Return whether a device has a random address, and its twin a lasting one."""
    netdev = host.netdev(device.netdev)
    return bool(netdev and not netdev.lasting and twin_state(host, netdev) == "random")


def _attach_socket(
    host: Host, own: OwnAddress, _nodes: int, _devices: Sequence[Rdma]
) -> Attachment:
    # TCP can use both halves of a cage, as RDMA does.
    both = own.netdev.twin and twin_state(host, own.netdev) in ("both", "link-local")
    usable = usable_rdma(host)
    notes = []
    if not usable:
        notes.append(f"sockets, since no RDMA device is usable here: {devices_of(host)}")
    elif own.netdev.name not in (each.netdev for each in usable):
        fast = ", ".join(f"{each.name} on {each.netdev}" for each in usable)
        notes.append(f"sockets, as asked for; RoCE could use {fast}: --topology roce")
    return Attachment(
        topology="socket",
        data=own.netdev.name,
        netdevs=(own.netdev.name, *([own.netdev.twin] if both else [])),
        cages=tuple(each for each in [own.netdev.cage] if each is not None),
        notes=tuple(notes),
    )


def _attach_hetero(
    _host: Host, own: OwnAddress, _nodes: int, _devices: Sequence[Rdma]
) -> Attachment:
    """Return one interface: a Thor has no RDMA."""
    return Attachment(topology="hetero", data=own.netdev.name, netdevs=(own.netdev.name,))


_ATTACHERS: Mapping[str, Callable[[Host, OwnAddress, int, Sequence[Rdma]], Attachment]] = {
    "roce": _attach_roce,
    "ring": _attach_ring,
    "socket": _attach_socket,
    "hetero": _attach_hetero,
}


def _cage_numbers(devices: Iterable[Rdma]) -> tuple[int, ...]:
    return tuple(sorted({each.cage for each in devices if each.cage is not None}))


def _exact_names(host: Host, names: Sequence[str]) -> str:
    """Return names for NCCL, which takes prefixes; ``=`` makes them exact where that matters."""
    others = [each.name for each in host.rdma if each.name not in names]
    exact = any(other.startswith(tuple(names)) for other in others)
    return ("=" if exact else "") + ",".join(names)
