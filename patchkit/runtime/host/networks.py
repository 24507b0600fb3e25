"""Judge from the facts of a host which links can carry data, and which share a network. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from ipaddress import IPv4Interface, ip_address, ip_network
from itertools import product
from typing import Literal

from patchkit.frozen import frozen
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.rules.releases import read_env_data

TwinState = Literal[
    "none", "down", "bare", "bare-first", "random", "link-local", "both"
]
"""How the other half of a netdev's cage is addressed: see ``twin_state``."""


@frozen
class Overlap:
    """Two interfaces of one host that are in one network; ``netdev`` is one of the named ones."""

    netdev: Netdev
    address: IPv4Interface
    other: Netdev
    present: IPv4Interface


def overlaps(host: Host, names: Collection[str]) -> Iterator[Overlap]:
    """Yield where another interface is in a network of the named ones, link-local aside."""
    named = [netdev for netdev in host.netdevs if netdev.name in names]
    others = [
        netdev
        for netdev in host.netdevs
        if netdev.name not in names and netdev.kind != "loopback"
    ]
    for netdev in named:
        for address, other in product(netdev.lasting, others):
            for present in other.lasting:
                if present.network.overlaps(address.network):
                    yield Overlap(
                        netdev=netdev,
                        address=address,
                        other=other,
                        present=present,
                    )


def twin_state(host: Host, netdev: Netdev) -> TwinState:
    """Return how the other half of a cage is addressed, for a netdev with an address.

    ``none`` for no other half; ``down``; ``bare`` for no IPv4 address, ``bare-first`` if it is the
    first half, by PCI address; ``random`` where only one of both has a lasting address and the
    other a link-local one; ``link-local`` and ``both`` where they are alike.
    """
    twin = host.netdev(netdev.twin)
    if twin is None:
        return "none"
    if not twin.up:
        return "down"
    if not twin.ipv4:
        return "bare" if netdev.pci < twin.pci else "bare-first"

    if netdev.ipv4 and bool(netdev.lasting) is not bool(twin.lasting):
        return "random"
    return "both" if twin.lasting else "link-local"


def one_half_fills(speed: int | None) -> bool:
    """Return whether one half of a cage carries all of a link; ``speed`` in Mbit/s, or unknown."""
    half_gbits = read_env_data("hardware")["connectx"]["half_gbits"]
    return speed is not None and speed <= half_gbits * 1000


def in_reach(netdev: Netdev, address: str) -> list[IPv4Interface]:
    """Return a netdev's addresses that reach another without a router, or in an overlay."""
    target = ip_address(address)
    overlays = map(ip_network, read_env_data("hardware")["overlays"]["networks"])
    with_target = [network for network in overlays if target in network]

    reaching = []
    for interface in netdev.ipv4:
        # An address of a single host: a network without others, unless it is an overlay's.
        is_single = interface.network.prefixlen == interface.max_prefixlen
        if is_single:
            is_near = any(interface.ip in network for network in with_target)
        else:
            is_near = target in interface.network

        if is_near:
            reaching.append(interface)
    return reaching


def describe_addresses(host: Host) -> str:
    """Return ``192.168.100.10 on enp1s0f0np0, …``, without addresses of the loopback."""
    places = [f"{ip} on {netdev.name}" for netdev in host.netdevs for ip in netdev.ips]
    shown = [place for place in places if not place.startswith("127.")]
    return ", ".join(shown) or "no IPv4 address"
