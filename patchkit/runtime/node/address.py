"""Find the IPv4 address, and its interface, that a node announces to the others of its cluster."""

from __future__ import annotations

from ipaddress import IPv4Address

from patchkit.errors import PatchkitError
from patchkit.runtime.host.advice import remark
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.host.networks import describe_addresses, in_reach
from patchkit.runtime.node.fabric import Fabric
from patchkit.runtime.rules.refusals import refusal


def own_address(
    host: Host, topology: str, role: str, head: str, fabric: Fabric
) -> tuple[Netdev, str]:
    """Return this host's interface and address, first of the fabric's. Raises HostError."""
    if role == "worker":
        if host.has_address(head):
            raise refusal("head-here", head=head)
        groups = (fabric.ports, fabric.usable)
        first, fast = ({port.netdev.name for port in ports} for ports in groups)
        near = [
            netdev for netdev in host.netdevs if netdev.up and in_reach(netdev, head)
        ]
        if not near:
            raise cable_refusal(host, "no-way-to-head", head=head)
        # Of several interfaces in that network the one for the data first, and last an RDMA device
        # that was left out, since it shares that network; names alone depend on udev.
        best = min(
            near,
            key=lambda it: (it.name not in first, it.name in fast, it.pci, it.name),
        )
        # An interface may have several addresses; the head reaches this one directly.
        return best, str(in_reach(best, head)[0].ip)
    if not head:
        return _head_address(host, topology, fabric)
    if netdev := host.netdev_of(head):
        return netdev, head
    raise refusal("head-elsewhere", head=head, has=describe_addresses(host))


def named_address(head: str) -> str:
    """Return the text if it is an IPv4 address. Raises UsageError."""
    try:
        IPv4Address(head)
    except ValueError:
        raise refusal("no-ipv4", head=head) from None
    return head


def cable_refusal(host: Host, key: str, **fields: object) -> PatchkitError:
    """Return the error for a cable that is missing; without a ConnectX-7 that is the reason."""
    found = refusal(key, has=describe_addresses(host), **fields)
    if off_bus := remark(host, "no-connectx"):
        found.what, found.why = f"{found.what}\n{off_bus.what}", off_bus.why
        found.hint = f"{off_bus.hint}; or use the LAN, by sockets: --head-ip ADDRESS"
    elif joined := remark(host, "part-of-master"):
        found.what, found.why = f"{found.what}\n{joined.what}", joined.why
        found.hint = joined.hint
    return found


def _head_address(host: Host, topology: str, fabric: Fabric) -> tuple[Netdev, str]:
    fast = {rdma.netdev for rdma in host.rdma}
    addressed = [netdev for netdev in host.netdevs if netdev.up and netdev.ipv4]
    # The interfaces that a head may announce, best first.
    found: list[Netdev] = []
    # A ring's cables join neighbours alone, and a Thor has no RDMA: the LAN reaches every node.
    for kind in ("ethernet", "wifi") if topology in ("ring", "hetero") else ():
        found += (
            each for each in addressed if each.kind == kind and each.name not in fast
        )
    if topology != "ring":
        wired = [netdev for netdev in addressed if netdev.kind == "ethernet"]
        cabled = [netdev for netdev in wired if netdev.name in fast or netdev.port]
        found += (port.netdev for port in fabric.ports)
        found += sorted(
            cabled, key=lambda each: (not each.lasting, each.pci, each.name)
        )
    elif not found:
        raise refusal("ring-without-lan", has=describe_addresses(host))
    if not found:
        raise cable_refusal(host, "no-cable")
    # A link-local address is drawn anew at each boot, so any other one is better.
    stays = min(found[0].ipv4, key=lambda own: own.ip.is_link_local)
    return found[0], str(stays.ip)
