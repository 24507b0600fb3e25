"""Check the QSFP network of a host from one end. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Interface

from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Host, Netdev, Rdma
from patchkit.runtime.net.plan import Cages, cabled, cages, facts, named

REPLAN = "`patchkit net plan`, then apply, on both nodes"


def passed(where: str, about: str, what: str) -> Finding:
    return _finding(Level.OK, where, about, what)


def failed(where: str, about: str, what: str, hint: str) -> Finding:
    return _finding(Level.ERROR, where, about, what, hint)


def warned(where: str, about: str, what: str, hint: str) -> Finding:
    return _finding(Level.WARNING, where, about, what, hint)


def unknown(where: str, about: str, what: str, hint: str = "") -> Finding:
    return _finding(Level.UNKNOWN, where, about, what, hint)


def _finding(level: Level, where: str, about: str, what: str, hint: str = "") -> Finding:
    """Return a finding at an interface, an address or a pair; ``about`` names what was checked."""
    return Finding(level=level, where=where, about=about, what=what, hint=hint, kind=HostError)


def groups(host: Host, netdevs: Sequence[str] = (), cage: int | None = None) -> Cages:
    """Return the cages to check: those named, else those with an address, else those cabled.

    Raises UsageError, HostError.
    """
    if netdevs:
        return named(host, netdevs)
    known = cages(host)
    if cage is not None and cage in known:
        return {cage: known[cage]}
    if not known or cage is not None:
        raise HostError(
            "this machine has no QSFP cage that patchkit could recognise"
            + (f" as cage {cage}" if cage is not None else ""),
            why="the ConnectX-7 or its driver is missing, or this is not a DGX Spark",
            hint="`patchkit probe` shows what there is; or name interfaces with --netdev",
        )
    addressed = {number: twins for number, twins in known.items() if any(t.ipv4 for t in twins)}
    return addressed or cabled(host) or known


def host_checks(host: Host, chosen: Cages, mtu: int) -> Iterator[Finding]:
    """Yield what can be seen from one end."""
    for cage, twins in chosen.items():
        for netdev in twins:
            yield _link(netdev)
            yield _speed(netdev)
            yield _mtu(netdev, mtu)
            yield _address(netdev)
            yield _gid(host, netdev)
            yield _lanes(netdev)
        yield _both(cage, twins)
    yield from _apart(host, chosen)


def lasting(netdev: Netdev) -> tuple[IPv4Interface, ...]:
    """Return the IPv4 addresses that are not link-local."""
    return tuple(each for each in netdev.ipv4 if not each.is_link_local)


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
    return warned(
        netdev.name, "speed", f"{seen}, a DGX Spark's cage has {wanted}", "the cable, the switch"
    )


def _lanes(netdev: Netdev) -> Finding:
    """Check the PCIe lanes: some firmware trained half of them for the card's second half."""
    wanted = facts()["link"]["lanes"]
    if netdev.lanes is None:
        return unknown(netdev.name, "PCIe lanes", "sysfs does not say", "sudo lspci -vv")
    if netdev.lanes >= wanted:
        return passed(netdev.name, "PCIe lanes", f"x{netdev.lanes}")
    seen = f"x{netdev.lanes}, a DGX Spark's twin has x{wanted}"
    return warned(netdev.name, "PCIe lanes", seen, "update the firmware: fwupdmgr")


def _mtu(netdev: Netdev, mtu: int) -> Finding:
    if netdev.mtu == mtu:
        return passed(netdev.name, "MTU", str(netdev.mtu))
    return failed(
        netdev.name,
        "MTU",
        f"{netdev.mtu}, expected {mtu}",
        f"{quoted('patchkit', 'net', 'apply', '--mtu', str(mtu))}; "
        f"or verify with --mtu {netdev.mtu}, if both ends have it",
    )


def _address(netdev: Netdev) -> Finding:
    seen = ", ".join(map(str, netdev.ipv4))
    if lasting(netdev):
        return passed(netdev.name, "IPv4", seen)
    if seen:
        return warned(netdev.name, "IPv4", f"{seen}: link-local, changes at any boot", REPLAN)
    return failed(netdev.name, "IPv4", "no address", REPLAN)


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


def _both(cage: int | None, twins: Sequence[Netdev]) -> Finding:
    """Check that both halves of a cage are there, in different networks."""
    subject = ", ".join(each.name for each in twins)
    networks = [each.network for twin in twins for each in lasting(twin)]
    seen = ", ".join(map(str, networks)) or "none"
    if len(twins) < 2:
        if cage is None:  # named by the user, who may have left the other half out on purpose
            return unknown(subject, "both twins", "one interface was named", "name both twins")
        return failed(
            subject, "both twins", f"cage {cage} has one half only", "fwupdmgr update; lspci"
        )
    if not all(lasting(twin) for twin in twins):
        return failed(subject, "different networks", f"{seen}; a twin has no lasting one", REPLAN)
    if any(a.overlaps(b) for n, a in enumerate(networks) for b in networks[:n]):
        return failed(
            subject, "different networks", f"{seen}: Linux answers for either at either", REPLAN
        )
    return passed(subject, "different networks", seen)


def _apart(host: Host, chosen: Cages) -> Iterator[Finding]:
    """Check that no other interface of this host is in one of the networks."""
    ours = [
        (each.name, a.network) for twins in chosen.values() for each in twins for a in each.ipv4
    ]
    names = {each.name for twins in chosen.values() for each in twins}
    clashes = [
        f"{network} of {name} is also that of {other.name} ({present})"
        for other in host.netdevs
        if other.name not in names and other.kind != "loopback"
        for present in other.ipv4
        for name, network in ours
        if present.network.overlaps(network)
    ]
    if clashes:
        hint = "patchkit net plan --network 10.100.0.0/24; on every node"
        yield failed("this host", "networks of its own", "; ".join(clashes), hint)
    elif ours:
        yield passed("this host", "networks of its own", "no other interface is in them")
