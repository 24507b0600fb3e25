"""Tell how the interfaces of a host are addressed, and which share a network. Pure."""

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
"""How the other half of a netdev's cage is addressed; ``twin_state`` explains the values."""


@frozen
class Overlap:
    """Two interfaces of one host in one network.

    ``netdev`` has ``address``, ``other`` has ``present``.
    """

    netdev: Netdev
    address: IPv4Interface
    other: Netdev
    present: IPv4Interface


def overlaps(host: Host, names: Collection[str]) -> Iterator[Overlap]:
    """Yield each pair of a named interface and another one that are in one network.

    Link-local networks and the loopback do not count.
    """
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
    """Return how the other half of a netdev's cage is addressed.

    ``none``: there is no other half. ``down``: it is down. ``bare``: it has no IPv4 address;
    ``bare-first``: the same, and it is the first half by PCI address. ``random``: one half has a
    lasting address, the other only link-local ones. ``both``: the other half has a lasting address.
    ``link-local``: it has only link-local addresses, as this half has.
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
    """Return whether one half of a cage can carry a link of this speed in Mbit/s; None: no."""
    half_gbits = read_env_data("hardware")["connectx"]["half_gbits"]
    return speed is not None and speed <= half_gbits * 1000


def in_reach(netdev: Netdev, address: str) -> list[IPv4Interface]:
    """Return the addresses of a netdev that reach ``address`` without a router.

    They are in the same network, or in the same overlay of hardware.toml.
    """
    target = ip_address(address)
    overlays = map(ip_network, read_env_data("hardware")["overlays"]["networks"])
    with_target = [network for network in overlays if target in network]

    reaching = []
    for interface in netdev.ipv4:
        # A /32 has no other address in its network, but an overlay gives each node a /32.
        is_single = interface.network.prefixlen == interface.max_prefixlen
        if is_single:
            is_near = any(interface.ip in network for network in with_target)
        else:
            is_near = target in interface.network

        if is_near:
            reaching.append(interface)
    return reaching


def describe_addresses(host: Host) -> str:
    """Return ``192.168.100.10 on enp1s0f0np0, …``, without 127.x addresses."""
    places = [f"{ip} on {netdev.name}" for netdev in host.netdevs for ip in netdev.ips]
    shown = [place for place in places if not place.startswith("127.")]
    return ", ".join(shown) or "no IPv4 address"
