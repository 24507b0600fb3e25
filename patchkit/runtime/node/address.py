"""Find the IPv4 address that a node announces to its cluster, and the interface that has it."""

from __future__ import annotations

from ipaddress import IPv4Address

from patchkit.errors import PatchkitError
from patchkit.runtime.host.advice import find_remark
from patchkit.runtime.host.host import Host, Netdev, describe_addresses, in_reach
from patchkit.runtime.node.fabric import Fabric
from patchkit.runtime.rules.releases import refusal


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
        # Only the LAN reaches all nodes: the cables of a ring join neighbours, a Thor has no RDMA.
        choices += _find_lan(host)
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


def _find_addressed(host: Host, kind: str) -> list[Netdev]:
    """Return the interfaces of a kind that are up and have an IPv4 address."""
    netdevs = [netdev for netdev in host.netdevs if netdev.kind == kind]
    return [netdev for netdev in netdevs if netdev.up and netdev.ipv4]


def _find_lan(host: Host) -> list[Netdev]:
    """Return the interfaces without RDMA, wired ones first."""
    rdma_names = {rdma.netdev for rdma in host.rdma}
    netdevs = _find_addressed(host, "ethernet") + _find_addressed(host, "wifi")
    return [netdev for netdev in netdevs if netdev.name not in rdma_names]


def _find_cabled(host: Host) -> list[Netdev]:
    """Return the interfaces with RDMA or with a named port, those with a lasting address first."""
    rdma_names = {rdma.netdev for rdma in host.rdma}
    netdevs = _find_addressed(host, "ethernet")
    cabled = [netdev for netdev in netdevs if netdev.port or netdev.name in rdma_names]

    def rank(netdev: Netdev) -> tuple[bool, str, str]:
        return not netdev.lasting, netdev.pci, netdev.name

    return sorted(cabled, key=rank)
