"""Check the QSFP network of a host from one end. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Host, Netdev, Rdma
from patchkit.runtime.net import remarks
from patchkit.runtime.net.cages import Cages, cabled, cages, lasting, listing, named, no_card
from patchkit.runtime.net.facts import facts
from patchkit.runtime.net.remarks import said

REPLAN = "`patchkit net plan --role head`, then apply, and the same as worker there"


def passed(where: str, about: str, what: str) -> Finding:
    return said(Level.OK, where, about, what)


def failed(where: str, about: str, what: str, hint: str) -> Finding:
    return said(Level.ERROR, where, about, what, hint=hint)


def warned(where: str, about: str, what: str, hint: str) -> Finding:
    return said(Level.WARNING, where, about, what, hint=hint)


def unknown(where: str, about: str, what: str, hint: str = "") -> Finding:
    return said(Level.UNKNOWN, where, about, what, hint=hint)


def groups(host: Host, netdevs: Sequence[str] = (), cage: int | None = None) -> Cages:
    """Return the cages to check: those named, else those cabled, else those with an address.

    Raises UsageError, HostError.
    """
    if netdevs:
        return named(host, netdevs)
    known = cages(host)
    if not known:
        raise no_card(host)
    if cage is not None:
        if cage not in known:
            raise HostError(f"there is no cage {cage}", hint=listing(known))
        return {cage: known[cage]}
    addressed = {number: twins for number, twins in known.items() if any(t.ipv4 for t in twins)}
    return cabled(host) or addressed or known


def host_checks(host: Host, chosen: Cages, mtu: int | None) -> Iterator[Finding]:
    """Yield what can be seen from one end. ``mtu`` is what the user expects, None for any."""
    used = [cage for cage, twins in chosen.items() if any(twin.ipv4 for twin in twins)]
    for cage, twins in chosen.items():
        if used and cage not in used:
            yield remarks.spare_cage(cage, twins)
        else:
            yield from _halves(host, cage, twins, mtu)
    yield from remarks.ring_if_any(host, chosen)
    for cage, twins in cages(host).items():
        # Where the user named interfaces, the rest was not asked for.
        if not {cage, None} & chosen.keys() and cage not in host.cabled:
            yield from remarks.left_over(cage, twins)
    yield from _apart(host, chosen)


def _halves(
    host: Host, cage: int | None, twins: Sequence[Netdev], mtu: int | None
) -> Iterator[Finding]:
    for netdev in twins:
        others = [each for each in twins if each is not netdev]
        lit = [each for each in others if each.carrier]
        if lit and not netdev.carrier and not netdev.ipv4:
            # The one thing to say of it: nobody wants to use it, or it would have an address.
            yield _dark_half(netdev, lit[0])
            continue
        other = next((each for each in others if each.ipv4), None)
        yield _link(netdev)
        yield _speed(netdev)
        yield _mtu(netdev, lit, mtu)
        yield _address(netdev, other)
        yield _gid(host, netdev, other)
        yield _lanes(netdev)
    yield from remarks.link_local_pair(tuple(twins))
    yield from _both(cage, twins)


def _link(netdev: Netdev) -> Finding:
    seen = f"{netdev.state}, {'a' if netdev.carrier else 'no'} carrier"
    if netdev.up and netdev.carrier:
        return passed(netdev.name, "link", seen)
    return failed(
        netdev.name,
        "link",
        seen,
        f"{quoted('sudo', 'ip', 'link', 'set', netdev.name, 'up')}; the cable; the other end",
    )


def _dark_half(netdev: Netdev, other: Netdev) -> Finding:
    return said(
        Level.NOTE,
        netdev.name,
        "link",
        f"{netdev.state}, no carrier; its other half {other.name} has a link; not used",
        why="each half carries about half of what the cage can",
        hint=f"to use it as well: `{quoted('sudo', 'ip', 'link', 'set', netdev.name, 'up')}`",
    )


def _speed(netdev: Netdev) -> Finding:
    """Check the cage's speed. Each twin shows it, although its PCIe half carries less."""
    wanted, (low, high) = facts()["link"]["speed"], facts()["link"]["twin_gbits"]
    if netdev.speed is None:
        return unknown(
            netdev.name, "speed", "the driver does not say", quoted("ethtool", netdev.name)
        )
    seen = f"{netdev.speed} Mbit/s"
    if netdev.speed == wanted:
        return passed(netdev.name, "speed", f"{seen} for the cage; {low} to {high} Gb/s a twin")
    slower = f"{seen}, a DGX Spark's cage has {wanted}"
    return warned(netdev.name, "speed", slower, "the cable, or the switch and its port")


def _lanes(netdev: Netdev) -> Finding:
    """Check the PCIe lanes: some firmware trained half of them for the card's second half."""
    wanted = facts()["link"]["lanes"]
    if netdev.lanes is None:
        return unknown(netdev.name, "PCIe lanes", "sysfs does not say", "sudo lspci -vv")
    if netdev.lanes >= wanted:
        return passed(netdev.name, "PCIe lanes", f"x{netdev.lanes}")
    seen = f"x{netdev.lanes}, a DGX Spark's twin has x{wanted}"
    return warned(netdev.name, "PCIe lanes", seen, "update the firmware: fwupdmgr")


def _mtu(netdev: Netdev, others: Sequence[Netdev], mtu: int | None) -> Finding:
    """Check the MTU: any will do that both ends have, jumbo frames are better."""
    if mtu is not None:
        if netdev.mtu == mtu:
            return passed(netdev.name, "MTU", str(netdev.mtu))
        change = quoted("patchkit", "net", "plan", "--mtu", str(mtu))
        instead = f"or verify without --mtu, if both ends have {netdev.mtu}"
        return failed(netdev.name, "MTU", f"{netdev.mtu}, expected {mtu}", f"{change}; {instead}")
    more = next((each for each in others if each.mtu > netdev.mtu), None)
    if more:
        seen = f"{netdev.mtu}, its other half {more.name} has {more.mtu}"
        return warned(
            netdev.name, "MTU", seen, quoted("patchkit", "net", "plan", "--mtu", str(more.mtu))
        )
    if netdev.mtu < facts()["plan"]["mtu"]:
        return remarks.small_mtu(netdev.name, netdev.mtu)
    return passed(netdev.name, "MTU", str(netdev.mtu))


def _address(netdev: Netdev, other: Netdev | None) -> Finding:
    """Check the IPv4 address. ``other`` is the other half, if that has one."""
    seen = ", ".join(map(str, netdev.ipv4))
    if seen and not lasting(netdev) and other and lasting(other):
        return remarks.drawn_half(netdev, other)
    if seen:  # a remark tells of those that are link-local on both halves
        return passed(netdev.name, "IPv4", seen)
    if other:
        has = ", ".join(map(str, other.ipv4))
        seen = f"none, its other half {other.name} has {has}"
        return remarks.bare_half(netdev.name, seen, static=bool(lasting(other)))
    return failed(netdev.name, "IPv4", "no address", REPLAN)


def _gid(host: Host, netdev: Netdev, other: Netdev | None) -> Finding:
    """Check for a RoCE v2 GID: that of the IPv4 address, any where the other half has one."""
    device = next((each for each in host.rdma if each.netdev == netdev.name), None)
    if device is None:
        return unknown(
            netdev.name, "RoCE v2 GID", "no RDMA device here", "ls /sys/class/infiniband"
        )
    if not device.active:
        return failed(
            netdev.name, "RoCE v2 GID", f"{device.name} is {device.state}", "the link, as above"
        )
    known = [gid for gid in device.gids if gid.kind == "RoCE v2"]
    if other and not netdev.ipv4 and known:
        seen = f"{device.name} index {known[0].index}, not of IPv4"
        return passed(netdev.name, "RoCE v2 GID", seen)
    return _gid_of(device, netdev)


def _gid_of(device: Rdma, netdev: Netdev) -> Finding:
    wanted = {str(each.ip) for each in netdev.ipv4}
    found = [gid for gid in device.gids if gid.kind == "RoCE v2" and gid.address in wanted]
    if found:
        seen = f"{device.name} index {found[0].index} for {found[0].address}"
        return passed(netdev.name, "RoCE v2 GID", seen)
    seen = f"{device.name} has none for {', '.join(sorted(wanted)) or 'an address that is missing'}"
    return failed(netdev.name, "RoCE v2 GID", seen, f"give {netdev.name} its IPv4 address first")


def _both(cage: int | None, twins: Sequence[Netdev]) -> Iterator[Finding]:
    """Check that both halves of a cage are there, in different networks."""
    subject = ", ".join(each.name for each in twins)
    networks = [each.network for twin in twins for each in lasting(twin)]
    seen = ", ".join(map(str, networks))
    if len(twins) < 2:
        if cage is None:  # named by the user, who may have left the other half out on purpose
            yield unknown(subject, "both twins", "one interface was named", "name both twins")
        else:
            lacks = f"cage {cage} has one half only"
            yield failed(subject, "both twins", lacks, "fwupdmgr update; lspci")
    elif any(a.overlaps(b) for n, a in enumerate(networks) for b in networks[:n]):
        seen += ": Linux answers for either at either"
        yield failed(subject, "different networks", seen, REPLAN)
    elif all(lasting(twin) for twin in twins):
        yield passed(subject, "different networks", seen)


def _apart(host: Host, chosen: Cages) -> Iterator[Finding]:
    """Check that no other interface of this host is in one of the networks."""
    names = [each.name for twins in chosen.values() for each in twins if each.ipv4]
    found = list(remarks.shared_networks(host, names))
    yield from (replace(each, level=Level.ERROR) for each in found)
    if names and not found:
        yield passed("this host", "networks of its own", "no other interface is in them")
