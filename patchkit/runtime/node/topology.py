"""Choose how a node is attached to its cluster: topology, interfaces and address.

Pure: the facts of one host and what was asked for in, one answer or one error out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address

from patchkit.errors import HostError
from patchkit.runtime.host.host import Host, Rdma
from patchkit.runtime.node.address import (
    PLAN,
    OwnAddress,
    devices,
    is_near,
    own_address,
    usable_rdma,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """``address`` and ``netdev`` are this node's own, empty for a node alone.

    ``netdevs`` are all that carry data by TCP, ``hcas`` the RDMA devices in NCCL's syntax,
    ``notes`` what a user should know about the choice.
    """

    topology: str
    address: str = ""
    netdev: str = ""
    netdevs: tuple[str, ...] = ()
    hcas: str = ""
    notes: tuple[str, ...] = ()


def attach(
    host: Host, *, role: str, topology: str, nodes: int, head: str, target: str
) -> Attachment:
    """Return how a head or a worker is attached.

    ``topology`` may be ``auto``; ``head`` is the head's IPv4 address, which the head itself may
    leave empty. Raises HostError if the hardware is not what the request needs, UsageError without
    a head.
    """
    chosen = _topology(host, topology, nodes, head, target)
    own = own_address(host, chosen, role, head)
    lines = _LINES[chosen](host, own)
    return Attachment(
        topology=chosen,
        address=own.address,
        netdev=own.netdev.name,
        netdevs=lines.netdevs,
        hcas=_exact(host, lines.hcas),
        notes=(*lines.notes, *_about(own)),
    )


def _topology(host: Host, asked: str, nodes: int, head: str, target: str) -> str:
    usable = usable_rdma(host)
    if asked in ("roce", "ring") and not usable:
        raise HostError(
            f"{asked} needs an RDMA device that is active and has an IPv4 address; "
            f"here: {devices(host)}",
            why="the cable is out, the interface has no address, or, in a container, "
            "/dev/infiniband is missing",
            hint=f"see `patchkit probe`; {PLAN}; or sockets on every node, the head "
            "first: --topology socket",
        )
    if asked != "auto":
        return asked
    if target == "thor":
        return "hetero"
    # A switch takes one cable of each node: two cages in use on three nodes are a ring.
    if nodes > 2 and len({rdma.cage for rdma in usable}) > 1:
        return "ring"
    # No RDMA device reaches the address of the head: only sockets are left.
    if head and not is_near(host, head, usable):
        return "socket"
    return "roce" if usable else "socket"


# What carries the data


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    netdevs: tuple[str, ...]
    hcas: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _roce(host: Host, own: OwnAddress) -> _Lines:
    usable = usable_rdma(host)
    device = next((each for each in usable if each.netdev == own.netdev.name), None)
    if device is None:
        raise HostError(
            f"{own.netdev.name} ({own.address}) has no usable RDMA device; here: {devices(host)}",
            hint="name an address on the QSFP cable with --head-ip, or take --topology socket",
        )
    # NCCL has to name both halves: each carries half of the cable's bandwidth.
    cage = [each for each in host.rdma if each.name in (device.name, device.twin)]
    both = [each for each in usable if each in cage]
    return _Lines(
        netdevs=tuple(each.netdev for each in both),
        hcas=tuple(each.name for each in both),
        notes=tuple(_about_roce(host, cage, both, usable)),
    )


def _about_roce(
    host: Host, cage: list[Rdma], both: list[Rdma], usable: list[Rdma]
) -> Iterator[str]:
    if len(cage) == 1:
        yield f"{cage[0].name} has no second half here: about half of the cable's bandwidth"
    for each in cage:
        if each in both:
            continue
        netdev = host.netdev(each.netdev)
        lack = f"{each.netdev} has no IPv4 address"
        if not each.active or netdev is None or not netdev.up:
            lack = f"it is {each.state or 'down'}"
        yield (
            f"{each.name}, a half of the cable, is left out: {lack}; "
            "that costs half of the bandwidth"
        )
    others = [each.name for each in usable if each not in cage]
    if others:
        yield f"{', '.join(others)} are free: a second cable between two nodes brings nothing"


def _ring(host: Host, own: OwnAddress) -> _Lines:
    usable = usable_rdma(host)
    notes = [f"{own.netdev.name} carries the bootstrap, the cables carry the data"]
    if len({each.cage for each in usable}) < 2:
        notes.append(f"a ring uses both cages of every node; here: {devices(host)}")
    hcas = tuple(each.name for each in usable)
    return _Lines(netdevs=(own.netdev.name,), hcas=hcas, notes=tuple(notes))


def _socket(host: Host, own: OwnAddress) -> _Lines:
    other = host.netdev(own.netdev.twin)
    # TCP can use both halves of a cage, as RDMA does.
    more = (other.name,) if other and other.up and other.ipv4 else ()
    usable = usable_rdma(host)
    notes = []
    if not usable:
        notes.append(f"sockets, since no RDMA device is usable here: {devices(host)}")
    elif own.netdev.name not in (each.netdev for each in usable):
        fast = ", ".join(f"{each.name} on {each.netdev}" for each in usable)
        notes.append(f"sockets, since {own.netdev.name} has no RDMA device; RoCE could use {fast}")
    return _Lines(netdevs=(own.netdev.name, *more), notes=tuple(notes))


_LINES: Mapping[str, Callable[[Host, OwnAddress], _Lines]] = {
    "roce": _roce,
    "ring": _ring,
    "socket": _socket,
    "hetero": lambda _host, own: _Lines(netdevs=(own.netdev.name,)),  # a Thor has no RDMA
}


def _about(own: OwnAddress) -> Iterator[str]:
    if IPv4Address(own.address).is_link_local:
        yield f"{own.address} is link-local and changes at a boot: write this file anew then"
    others = [str(each.ip) for each in own.netdev.ipv4 if str(each.ip) != own.address]
    if others:
        yield f"{own.netdev.name} has {', '.join(others)} as well; {own.address} is taken"


def _exact(host: Host, names: tuple[str, ...]) -> str:
    """Return names for NCCL, which takes prefixes; ``=`` makes them exact where that matters."""
    others = [each.name for each in host.rdma if each.name not in names]
    exact = any(other.startswith(names) for other in others)
    return ("=" if exact else "") + ",".join(names)
