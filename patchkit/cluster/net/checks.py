"""Check the QSFP network of a host from one end. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from patchkit.cluster.net import remarks
from patchkit.cluster.net.cages import Cages, cabled, cages, listing, named, no_card
from patchkit.cluster.net.remarks import said
from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Host, Netdev, Rdma
from patchkit.runtime.host.network_facts import facts
from patchkit.runtime.host.networks import overlaps

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
    halves = [twin for twins in chosen.values() for twin in twins]
    yield from remarks.machine_remarks(host, "verify", halves)
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
    yield from _apart(host, halves)


def _halves(
    host: Host, cage: int | None, twins: Sequence[Netdev], mtu: int | None
) -> Iterator[Finding]:
    for netdev in twins:
        others = [each for each in twins if each is not netdev]
        lit = [each for each in others if each.carrier]
        if lit and not netdev.carrier and not netdev.ipv4:
            continue  # nobody uses it, or it would have an address; if that costs, a remark says so
        yield _link(netdev)
        yield _speed(netdev)
        yield _mtu(netdev, lit, mtu)
        # Of a half without an address beside one that has one, the remark on the machine tells.
        if netdev.ipv4 or not any(each.ipv4 for each in others):
            yield _address(netdev, others)
            yield _gid(host, netdev)
        yield _lanes(netdev)
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


def _address(netdev: Netdev, others: Sequence[Netdev]) -> Finding:
    """Check that there is one. Of link-local ones on two halves the machine's remarks tell."""
    seen = ", ".join(map(str, netdev.ipv4))
    if not seen:
        return failed(netdev.name, "IPv4", "no address", REPLAN)
    if netdev.lasting or any(each.ipv4 for each in others):
        return passed(netdev.name, "IPv4", seen)
    seen += ": link-local, drawn anew at any boot unless somebody set it"
    hint = "for addresses that stay: `patchkit net plan --twins`"
    return said(Level.NOTE, netdev.name, "IPv4", seen, hint=hint)


def _gid(host: Host, netdev: Netdev) -> Finding:
    """Check for a RoCE v2 GID of the interface's IPv4 address."""
    device = next((each for each in host.rdma if each.netdev == netdev.name), None)
    if device is None:
        return unknown(
            netdev.name, "RoCE v2 GID", "no RDMA device here", "ls /sys/class/infiniband"
        )
    if not device.active:
        return failed(
            netdev.name, "RoCE v2 GID", f"{device.name} is {device.state}", "the link, as above"
        )
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
    networks = [each.network for twin in twins for each in twin.lasting]
    seen = ", ".join(map(str, networks))
    if len(twins) < 2:
        if cage is None:  # named by the user, who may have left the other half out on purpose
            yield unknown(subject, "both twins", "one interface was named", "name both twins")
        else:
            lacks = f"cage {cage} has one half only"
            yield failed(subject, "both twins", lacks, "fwupdmgr update; lspci")
    elif any(a.overlaps(b) for n, a in enumerate(networks) for b in networks[:n]):
        seen += ": Linux answers for either at either"
        last = twins[-1]
        delete = quoted("sudo", "ip", "address", "del", str(last.lasting[0]), "dev", last.name)
        hint = f"{delete}; and where it is configured; then `patchkit net plan --twins`"
        yield failed(subject, "different networks", seen, hint)
    elif all(twin.lasting for twin in twins):
        yield passed(subject, "different networks", seen)


def _apart(host: Host, halves: Sequence[Netdev]) -> Iterator[Finding]:
    """Check that no other interface of this host is in one of the networks."""
    clashes = list(overlaps(host, [each.name for each in halves]))
    for each in clashes:
        what = f"{each.address} is in one network with {each.other.name} ({each.present})"
        command = quoted("sudo", "ip", "address", "del", str(each.address), "dev", each.netdev.name)
        hint = f"take one of both out, here and where it is configured: {command}"
        yield failed(each.netdev.name, "networks of its own", what, hint)
    if any(each.ipv4 for each in halves) and not clashes:
        yield passed("this host", "networks of its own", "no other interface is in them")
