"""See in the facts of a host which links can carry data, and whose networks they share. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Interface, ip_address, ip_network
from typing import Literal

from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.rules.releases import read_env_data

TwinState = Literal[
    "none", "down", "bare", "bare-first", "random", "link-local", "both"
]
"""How the other half of a netdev's cage is addressed: see ``twin_state``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Two interfaces of one host that are in one network; ``netdev`` is one of those asked for."""

    netdev: Netdev
    address: IPv4Interface
    other: Netdev
    present: IPv4Interface


def overlaps(host: Host, names: Collection[str]) -> Iterator[Overlap]:
    """Yield where another interface is in a network of the named ones, link-local aside."""
    for netdev in host.netdevs:
        for address in netdev.lasting if netdev.name in names else ():
            for other in host.netdevs:
                for present in other.lasting if other.name not in names else ():
                    if other.kind != "loopback" and present.network.overlaps(
                        address.network
                    ):
                        yield Overlap(
                            netdev=netdev, address=address, other=other, present=present
                        )


def twin_state(host: Host, netdev: Netdev) -> TwinState:
    """Return how the other half of the cage of a netdev with an address is addressed.

    ``none`` for no other half; ``down``; ``bare`` for no IPv4 address, ``bare-first`` if it is the
    first half, by PCI address; ``random`` where only one of both has a lasting address and the
    other a link-local one; ``link-local`` and ``both`` where they are alike.
    """
    other = host.netdev(netdev.twin)
    if other is None:
        return "none"
    if not other.up:
        return "down"
    if not other.ipv4:
        return "bare" if netdev.pci < other.pci else "bare-first"
    if netdev.ipv4 and bool(netdev.lasting) is not bool(other.lasting):
        return "random"
    return "both" if other.lasting else "link-local"


def one_half_fills(speed: int | None) -> bool:
    """Return whether one half of a cage carries all of a link; ``speed`` in Mbit/s, or unknown."""
    return (
        speed is not None
        and speed <= read_env_data("hardware")["connectx"]["half_gbits"] * 1000
    )


def in_reach(netdev: Netdev, address: str) -> list[IPv4Interface]:
    """Return a netdev's addresses that reach another without a router, or in an overlay."""
    asked, overlays = (
        ip_address(address),
        read_env_data("hardware")["overlays"]["networks"],
    )
    return [
        own
        for own in netdev.ipv4
        if (own.network.prefixlen < own.max_prefixlen and asked in own.network)
        or (
            own.network.prefixlen == own.max_prefixlen
            and any(
                own.ip in ip_network(each) and asked in ip_network(each)
                for each in overlays
            )
        )
    ]


def describe_addresses(host: Host) -> str:
    found = [
        f"{own.ip} on {netdev.name}" for netdev in host.netdevs for own in netdev.ipv4
    ]
    return (
        ", ".join(text for text in found if not text.startswith("127."))
        or "no IPv4 address"
    )
