"""Find in the facts of a machine what its owner should know; texts and sources are data."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from patchkit.finding import Finding, Level
from patchkit.runtime.host import hardware
from patchkit.runtime.host.host import Host, Netdev

Found = Iterator[dict[str, object]]


def remarks(host: Host) -> tuple[Finding, ...]:
    """Return remarks in the order of hardware.toml: what stops RoCE comes first."""
    return tuple(
        Finding(
            about=each["id"],
            level=Level(each["severity"]),
            what=each["says"].format_map(fields),
            why=each["why"],
            source=each["source"],
        )
        for each in hardware.facts()["remark"]
        for fields in _CHECKS[each["id"]](host)
    )


def _no_rdma(host: Host) -> Found:
    owned = {each.netdev for each in host.rdma}
    bare = [each.name for each in _cards(host) if each.name not in owned]
    if bare:
        yield {"netdevs": ", ".join(bare)}


def _no_address(host: Host) -> Found:
    for pair in _cabled(host):
        if not any(each.ipv4 for each in pair):
            yield {"netdevs": ", ".join(each.name for each in pair)}


def _one_twin_address(host: Host) -> Found:
    for one, other in _twins(host):
        for has, without in ((one, other), (other, one)):
            if has.ipv4 and not without.ipv4:
                yield {"netdev": has.name, "without": without.name, "address": has.ipv4[0]}


def _same_subnet(host: Host) -> Found:
    for one, other in _twins(host):
        shared = {each.network for each in one.ipv4} & {each.network for each in other.ipv4}
        for network in sorted(shared):
            if not network.is_link_local:  # the remark link-local is about these
                yield {"netdev": one.name, "twin": other.name, "network": network}


def _twin_mtu(host: Host) -> Found:
    for one, other in _twins(host):
        if one.mtu and other.mtu and one.mtu != other.mtu:
            yield {"netdev": one.name, "mtu": one.mtu, "twin": other.name, "other": other.mtu}


def _lanes(host: Host) -> Found:
    right = hardware.facts()["connectx"]["lanes"]
    for each in _cards(host):
        if each.twin and each.lanes is not None and each.lanes < right:
            yield {"netdev": each.name, "pci": each.pci, "lanes": each.lanes, "right": right}


def _link_local(host: Host) -> Found:
    lit = [each for each in _cards(host) if each.carrier]
    found = [f"{each.name} {own}" for each in lit for own in each.ipv4 if own.is_link_local]
    if found:
        yield {"addresses": ", ".join(found)}


def _renamed(host: Host) -> Found:
    names = [each.name for each in host.rdma if each.twin and each.name.startswith("mlx5_")]
    if names:
        yield {"names": ", ".join(names)}


def _rate(host: Host) -> Found:
    for one, other in _twins(host):
        if one.speed and one.speed == other.speed:
            yield {"cage": one.cage, "speed": one.speed // 1000}


_CHECKS: dict[str, Callable[[Host], Found]] = {
    "no-rdma": _no_rdma,
    "no-address": _no_address,
    "one-twin-address": _one_twin_address,
    "same-subnet": _same_subnet,
    "twin-mtu": _twin_mtu,
    "lanes": _lanes,
    "link-local": _link_local,
    "renamed": _renamed,
    "rate": _rate,
}


def _cards(host: Host) -> list[Netdev]:
    """Return the halves of cages by PCI address: names depend on udev."""
    halves = (each for each in host.netdevs if each.cage is not None)
    return sorted(halves, key=lambda each: each.pci)


def _cabled(host: Host) -> Iterator[tuple[Netdev, ...]]:
    """Yield the netdevs of each cage that has a cable."""
    for cage in host.cabled:
        yield tuple(each for each in _cards(host) if each.cage == cage)


def _twins(host: Host) -> Iterator[tuple[Netdev, Netdev]]:
    """Yield the two halves of each cage that has a cable."""
    for one, *others in _cabled(host):
        yield from ((one, other) for other in others if one.twin == other.name)
