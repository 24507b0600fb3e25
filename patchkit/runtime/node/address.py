"""Find the IPv4 address, and its interface, that a node announces to the others of its cluster."""

from __future__ import annotations

from ipaddress import IPv4Address

from patchkit.errors import HostError, UsageError
from patchkit.runtime.host.advice import remark
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.host.networks import describe_addresses, in_reach
from patchkit.runtime.node.fabric import Fabric

PLAN = "give it one, for example as `patchkit net plan` says"


def own_address(
    host: Host, topology: str, role: str, head: str, fabric: Fabric
) -> tuple[Netdev, str]:
    """Return this host's interface and address, first of the fabric's. Raises HostError."""
    if role == "worker":
        check_no_head(host, named_address(head))
        groups = (fabric.ports, fabric.usable)
        first, fast = ({port.netdev.name for port in ports} for ports in groups)
        near = [netdev for netdev in host.netdevs if netdev.up and in_reach(netdev, head)]
        if not near:
            raise lacking(
                host,
                f"no interface of this host is in a network with the head, {head}; "
                f"it has {describe_addresses(host)}",
                why="another cage is cabled than the one with the address, or the address is "
                "missing",
                hint=f"see `patchkit probe` on both; {PLAN}",
            )
        # Of several interfaces in that network the one for the data first, and last an RDMA device
        # that was left out, since it shares that network; names alone depend on udev.
        best = min(near, key=lambda it: (it.name not in first, it.name in fast, it.pci, it.name))
        # An interface may have several addresses; the head reaches this one directly.
        return best, str(in_reach(best, head)[0].ip)
    if not head:
        return _head_address(host, topology, fabric)
    for netdev in host.netdevs:
        if any(str(own.ip) == named_address(head) for own in netdev.ipv4):
            return netdev, head
    raise HostError(
        f"{head} is no address of this host; it has {describe_addresses(host)}",
        hint="--head-ip is the head's own address: run this on the head, or with --role worker",
    )


def named_address(head: str) -> str:
    """Return the text if it is an IPv4 address. Raises UsageError."""
    try:
        IPv4Address(head)
    except ValueError:
        raise UsageError(
            f"{head!r} is not an IPv4 address", hint="NCCL's RoCE v2 goes by IPv4: 192.168.100.10"
        ) from None
    return head


def check_no_head(host: Host, head: str) -> None:
    """Raise HostError if a worker has its head's address."""
    if host.has_address(head):
        raise HostError(
            f"{head}, the head's address, is this host's own",
            why="this is the head, or two nodes have the same address",
            hint="run this on the worker, or give each node its own address",
        )


def lacking(host: Host, what: str, why: str, hint: str) -> HostError:
    """Return the error for a cable that is missing; without a ConnectX-7 that is the reason."""
    if off_bus := remark(host, "no-connectx"):
        what, why = f"{what}\n{off_bus.what}", off_bus.why
        hint = f"{off_bus.hint}; or use the LAN, by sockets: --head-ip ADDRESS"
    return HostError(what, why=why, hint=hint)


def _head_address(host: Host, topology: str, fabric: Fabric) -> tuple[Netdev, str]:
    fast = {rdma.netdev for rdma in host.rdma}
    addressed = [netdev for netdev in host.netdevs if netdev.up and netdev.ipv4]
    # The interfaces that a head may announce, best first.
    found: list[Netdev] = []
    # A ring's cables join neighbours alone, and a Thor has no RDMA: the LAN reaches every node.
    for kind in ("ethernet", "wifi") if topology in ("ring", "hetero") else ():
        found += (each for each in addressed if each.kind == kind and each.name not in fast)
    if topology != "ring":
        wired = [netdev for netdev in addressed if netdev.kind == "ethernet"]
        cabled = [netdev for netdev in wired if netdev.name in fast or netdev.port]
        found += (port.netdev for port in fabric.ports)
        found += sorted(cabled, key=lambda each: (not each.lasting, each.pci, each.name))
    elif not found:
        raise HostError(
            "in a ring no cable reaches all nodes, and beside the cables this host has no address; "
            f"it has {describe_addresses(host)}",
            hint="connect the LAN or the Wi-Fi; or name an address that every node can reach: "
            "--head-ip ADDRESS",
        )
    if not found:
        raise lacking(
            host,
            "no QSFP cage is cabled and has an IPv4 address; this host has "
            f"{describe_addresses(host)}",
            why="",
            hint=f"{PLAN}; or use another network, by sockets: --head-ip ADDRESS",
        )
    # A link-local address is drawn anew at each boot, so any other one is better.
    stays = min(found[0].ipv4, key=lambda own: own.ip.is_link_local)
    return found[0], str(stays.ip)
