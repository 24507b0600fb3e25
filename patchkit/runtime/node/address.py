"""Find the IPv4 address, and its interface, that a node announces to the others of its cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, ip_address, ip_network

from patchkit.errors import HostError, UsageError
from patchkit.runtime.host import hardware
from patchkit.runtime.host.advice import remark
from patchkit.runtime.host.host import Host, Netdev, Rdma

PLAN = "give it one, for example as `patchkit net plan` says"


@dataclass(frozen=True, slots=True)
class OwnAddress:
    """An IPv4 address of this host and the interface that has it."""

    netdev: Netdev
    address: str


def own_address(
    host: Host, topology: str, role: str, head: str, data: Sequence[Rdma]
) -> OwnAddress:
    """Return the address; ``data`` are the devices that RoCE would use, best first.

    Raises HostError if there is none, UsageError for a malformed head.
    """
    if role == "worker":
        return _worker_address(host, named_address(head), data)
    if head:
        return _address_holder(host, named_address(head))
    return _head_address(host, topology, data)


def named_address(head: str) -> str:
    """Return the text if it is an IPv4 address. Raises UsageError."""
    try:
        IPv4Address(head)
    except ValueError:
        raise UsageError(
            f"{head!r} is not an IPv4 address", hint="NCCL's RoCE v2 goes by IPv4: 192.168.100.10"
        ) from None
    return head


def _address_holder(host: Host, address: str) -> OwnAddress:
    for netdev in host.netdevs:
        if any(str(each.ip) == address for each in netdev.ipv4):
            return OwnAddress(netdev, address)
    raise HostError(
        f"{address} is no address of this host; it has {addresses(host)}",
        hint="--head-ip is the head's own address: run this on the head, or with --role worker",
    )


def _worker_address(host: Host, head: str, data: Sequence[Rdma]) -> OwnAddress:
    check_no_head(host, head)
    first, fast = ({rdma.netdev for rdma in each} for each in (data, usable_rdma(host)))
    near = [netdev for netdev in host.netdevs if netdev.up and reaches(netdev, head)]
    # Of several interfaces in that network the one for the data first, and last an RDMA device that
    # was left out, since it shares that network; names alone depend on udev.
    near.sort(
        key=lambda each: (each.name not in first, each.name in fast, each.pci, each.name),
    )
    if not near:
        raise lacking(
            host,
            f"no interface of this host is in a network with the head, {head}; "
            f"it has {addresses(host)}",
            why="another cage is cabled than the one with the address, or the address is missing",
            hint=f"see `patchkit probe` on both; {PLAN}",
        )
    # An interface may have several addresses; the head reaches this one directly.
    address = next(each for each in near[0].ipv4 if _is_in_reach(each, head))
    return OwnAddress(near[0], str(address.ip))


def check_no_head(host: Host, head: str) -> None:
    """Raise HostError if a worker has its head's address."""
    if host.has_address(head):
        raise HostError(
            f"{head}, the head's address, is this host's own",
            why="this is the head, or two nodes have the same address",
            hint="run this on the worker, or give each node its own address",
        )


def _head_address(host: Host, topology: str, data: Sequence[Rdma]) -> OwnAddress:
    netdev = next(iter(_head_candidates(host, topology, data)), None)
    if netdev is None and topology == "ring":
        raise HostError(
            "in a ring no cable reaches all nodes, and beside the cables this host has no address; "
            f"it has {addresses(host)}",
            hint="connect the LAN or the Wi-Fi; or name an address that every node can reach: "
            "--head-ip ADDRESS",
        )
    if netdev is None:
        raise lacking(
            host,
            f"no QSFP cage is cabled and has an IPv4 address; this host has {addresses(host)}",
            why="",
            hint=f"{PLAN}; or use another network, by sockets: --head-ip ADDRESS",
        )
    # A link-local address is drawn anew at each boot, so any other one is better.
    stays = min(netdev.ipv4, key=lambda each: each.ip.is_link_local)
    return OwnAddress(netdev, str(stays.ip))


def _head_candidates(host: Host, topology: str, data: Sequence[Rdma]) -> Iterator[Netdev]:
    """Return interfaces that a head may announce, best first."""
    fast = {rdma.netdev for rdma in host.rdma}
    # A ring's cables join neighbours alone, and a Thor has no RDMA: the LAN reaches every node.
    if topology in ("ring", "hetero"):
        for kind in ("ethernet", "wifi"):
            yield from (each for each in _addressed_netdevs(host, kind) if each.name not in fast)
    if topology != "ring":
        yield from filter(None, (host.netdev(each.netdev) for each in data))
        cabled = [each for each in _addressed_netdevs(host) if each.name in fast or each.port]
        yield from sorted(cabled, key=lambda each: (not each.lasting, each.pci, each.name))


def _addressed_netdevs(host: Host, kind: str = "ethernet") -> list[Netdev]:
    return [each for each in host.netdevs if each.kind == kind and each.up and each.ipv4]


def lacking(host: Host, what: str, why: str, hint: str) -> HostError:
    """Return the error for a cable that is missing; without a ConnectX-7 that is the reason."""
    if off_bus := remark(host, "no-connectx"):
        what, why = f"{what}\n{off_bus.what}", off_bus.why
        hint = f"{off_bus.hint}; or use the LAN, by sockets: --head-ip ADDRESS"
    return HostError(what, why=why, hint=hint)


# RDMA devices


def usable_rdma(host: Host) -> list[Rdma]:
    """Return active RDMA devices that RoCE v2 can address by IPv4, ordered by PCI address."""
    addressed = {each.name for each in host.netdevs if each.up and each.ipv4}
    found = [rdma for rdma in host.rdma if rdma.active and rdma.netdev in addressed]
    return sorted(found, key=lambda rdma: (rdma.pci, rdma.name))


def reaches(netdev: Netdev, address: str) -> bool:
    """Return whether an address is in a network of the interface, overlay networks included."""
    return any(_is_in_reach(each, address) for each in netdev.ipv4)


def _is_in_reach(own: IPv4Interface, address: str) -> bool:
    if own.network.prefixlen < own.max_prefixlen:
        return ip_address(address) in own.network
    # A single host's address in an overlay network reaches all of it.
    overlays = map(ip_network, hardware.facts()["overlays"]["networks"])
    return any(own.ip in each and ip_address(address) in each for each in overlays)


# Words


def devices_of(host: Host) -> str:
    found = [
        f"{each.name} {each.state or 'of unknown state'} on {each.netdev or 'nothing'}"
        for each in host.rdma
    ]
    return ", ".join(found) or "no RDMA device"


def addresses(host: Host) -> str:
    found = [f"{each.ip} on {netdev.name}" for netdev in host.netdevs for each in netdev.ipv4]
    return ", ".join(each for each in found if not each.startswith("127.")) or "no IPv4 address"
