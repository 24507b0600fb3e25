"""Where a node sits in its cluster: which topology, over which interfaces, under which address.

Pure: the facts of one host and what was asked for in, one answer or one error out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address

from patchkit.errors import HostError
from patchkit.runtime.env.address import PLAN, Own, devices, is_near, own_address, usable_rdma
from patchkit.runtime.host.host import Host, Rdma


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
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


def take_seat(host: Host, *, role: str, topology: str, nodes: int, head: str, target: str) -> Seat:
    """Raises HostError if the hardware is not what the request needs, UsageError without a head.

    ``topology`` may be ``auto``; ``head`` is the head's IPv4 address, which the head itself may
    leave empty.
    """
    if role == "single":
        return Seat(topology="single")
    chosen = _topology(host, topology, nodes, head, target)
    own = own_address(host, chosen, role, head)
    lines = {"roce": _roce, "ring": _ring, "socket": _socket, "hetero": _plain}[chosen](host, own)
    return Seat(
        topology=chosen,
        address=own.address,
        netdev=own.netdev.name,
        netdevs=lines.netdevs,
        hcas=_exact(host, lines.hcas),
        notes=(*lines.notes, *_about(own)),
    )


# Which topology


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
    if nodes > 2 and len({rdma.cage for rdma in usable}) > 1:
        return "ring"
    if head and not is_near(host, head, usable):
        return "socket"
    return "roce" if usable else "socket"


# What carries the data


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    netdevs: tuple[str, ...]
    hcas: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _roce(host: Host, own: Own) -> _Lines:
    usable = usable_rdma(host)
    device = next((each for each in usable if each.netdev == own.netdev.name), None)
    if device is None:
        raise HostError(
            f"{own.netdev.name} ({own.address}) has no usable RDMA device; here: {devices(host)}",
            hint="name an address on the QSFP cable with --head-ip, or take --topology socket",
        )
    cage = [each for each in host.rdma if each.name in (device.name, device.twin)]
    both = [each for each in usable if each in cage]
    return _Lines(
        netdevs=tuple(each.netdev for each in both),
        hcas=tuple(each.name for each in both),
        notes=(*_halves(host, cage, both), *_spare(usable, cage)),
    )


def _halves(host: Host, cage: list[Rdma], both: list[Rdma]) -> Iterator[str]:
    if len(cage) == 1:
        yield f"{cage[0].name} has no second half here: about half of the cable's bandwidth"
    for each in cage:
        if each not in both:
            yield (
                f"{each.name}, a half of the cable, is left out: {_lack(host, each)}; "
                "that costs half of the bandwidth"
            )


def _lack(host: Host, rdma: Rdma) -> str:
    netdev = host.netdev(rdma.netdev)
    if not rdma.active or netdev is None or not netdev.up:
        return f"it is {rdma.state or 'down'}"
    return f"{netdev.name} has no IPv4 address"


def _spare(usable: list[Rdma], cage: list[Rdma]) -> Iterator[str]:
    others = [each.name for each in usable if each not in cage]
    if others:
        yield f"{', '.join(others)} are free: a second cable between two nodes brings nothing"


def _ring(host: Host, own: Own) -> _Lines:
    usable = usable_rdma(host)
    notes = [f"{own.netdev.name} carries the bootstrap, the cables carry the data"]
    if len({each.cage for each in usable}) < 2:
        notes.append(f"a ring uses both cages of every node; here: {devices(host)}")
    hcas = tuple(each.name for each in usable)
    return _Lines(netdevs=(own.netdev.name,), hcas=hcas, notes=tuple(notes))


def _socket(host: Host, own: Own) -> _Lines:
    other = host.netdev(own.netdev.twin)
    more = (other.name,) if other and other.up and other.ipv4 else ()
    return _Lines(netdevs=(own.netdev.name, *more), notes=tuple(_why_sockets(host, own)))


def _why_sockets(host: Host, own: Own) -> Iterator[str]:
    usable = usable_rdma(host)
    if not usable:
        yield f"sockets, since no RDMA device is usable here: {devices(host)}"
    elif own.netdev.name not in (each.netdev for each in usable):
        fast = ", ".join(f"{each.name} on {each.netdev}" for each in usable)
        yield f"sockets, since {own.netdev.name} has no RDMA device; RoCE could use {fast}"


def _plain(host: Host, own: Own) -> _Lines:  # noqa: ARG001
    return _Lines(netdevs=(own.netdev.name,))


def _about(own: Own) -> Iterator[str]:
    if IPv4Address(own.address).is_link_local:
        yield f"{own.address} is link-local and changes at a boot: write this file anew then"
    others = [str(each.ip) for each in own.netdev.ipv4 if str(each.ip) != own.address]
    if others:
        yield f"{own.netdev.name} has {', '.join(others)} as well; {own.address} is taken"


def _exact(host: Host, names: tuple[str, ...]) -> str:
    """NCCL takes names as prefixes: ``=`` makes them exact where one begins like another."""
    others = [each.name for each in host.rdma if each.name not in names]
    exact = any(other.startswith(name) for name in names for other in others)
    return ("=" if exact else "") + ",".join(names)
