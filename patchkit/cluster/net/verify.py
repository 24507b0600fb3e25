"""Verify the QSFP network of this host, with a peer or alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address

from patchkit.cluster.net.cages import Cages
from patchkit.cluster.net.checks import failed, host_checks, unknown
from patchkit.cluster.net.pair import pair_checks
from patchkit.cluster.net.path import mac_check, path_checks
from patchkit.finding import Finding
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.host.network_facts import facts

# perftest: over rdma_cm, no warning about CPU frequency, Gbit/s, for ten seconds.
_BANDWIDTH = ("-R", "-F", "--report_gbits", "-D", "10")
_FIRST_PORT = 18515  # ib_write_bw's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The other end: addresses that the user named, and its facts if they are known."""

    addresses: tuple[IPv4Address, ...] = ()
    host: Host | None = None


def verify(
    host: Host, chosen: Cages, peer: Peer, mtu: int | None, *, live: bool
) -> Iterator[Finding]:
    """Yield all checks. ``live``: the facts are this machine's, so its network can be tried.

    ``mtu`` is what both ends should have, None for what each has here.
    """
    yield from host_checks(host, chosen, mtu)
    if peer.host:
        yield from pair_checks(host, chosen, peer.host)
        yield from _right_peer(peer.host, peer.addresses)
    addresses = _targets(chosen, peer)
    for address in addresses if live else ():
        yield from path_checks(host, chosen, address, mtu)
        yield from _macs(chosen, peer, address)
    yield from _untried(chosen, addresses, live=live)


def bandwidth(host: Host, chosen: Cages, peer: Peer) -> list[str]:
    """Return commands that measure RDMA, which nothing here does: at the peer, then here."""
    addresses = _targets(chosen, peer)
    lines = []
    for number, (netdev, device) in enumerate(_devices(host, chosen)):
        there = next((each for each in addresses if _is_near(netdev, each)), None)
        if there:
            other = _device_at(peer.host, there) or "ITS-DEVICE"
            # A port for each twin, so that both can be measured at once.
            options = [*_BANDWIDTH, "-p", str(_FIRST_PORT + number)]
            lines.append(f"peer: {quoted('ib_write_bw', '-d', other, *options)}")
            lines.append(f"here: {quoted('ib_write_bw', '-d', device, *options, str(there))}")
    return lines


def expected() -> str:
    """Return what these commands should print."""
    (low, high), (least, most) = facts()["link"]["twin_gbits"], facts()["link"]["both_gbits"]
    return f"{low} to {high} Gb/s for one twin, {least} to {most} for both at once"


def slower() -> str:
    """Return what it is if they print much less."""
    return str(facts()["owners"]["hot_plug"])


def _targets(chosen: Cages, peer: Peer) -> tuple[IPv4Address, ...]:
    """Return the peer's addresses to try: those named, and those of its facts in our networks."""
    ours = {each.ip for twins in chosen.values() for n in twins for each in n.ipv4}
    # Only addresses in our networks: the peer may have others, on its LAN for example.
    told = [
        each.ip
        for netdev in (peer.host.netdevs if peer.host else ())
        for each in netdev.lasting
        if each.ip not in ours
        and any(_is_near(n, each.ip) for twins in chosen.values() for n in twins)
    ]
    return tuple(dict.fromkeys((*peer.addresses, *told)))


def _any_near(netdev: Netdev, addresses: Sequence[IPv4Address]) -> bool:
    return any(_is_near(netdev, address) for address in addresses)


def _is_near(netdev: Netdev, address: IPv4Address) -> bool:
    return any(address in each.network for each in netdev.ipv4)


def _right_peer(peer: Host, addresses: Sequence[IPv4Address]) -> Iterator[Finding]:
    known = {each.ip for netdev in peer.netdevs for each in netdev.ipv4}
    for address in addresses:
        if address not in known:
            seen = f"the peer's facts do not have it: {peer.system.hostname or 'unnamed'}"
            yield failed(str(address), "peer", seen, "are these the facts of that host, and new?")


def _macs(chosen: Cages, peer: Peer, address: IPv4Address) -> Iterator[Finding]:
    """Compare the neighbour's MAC with that of the peer's facts."""
    here = next((n for twins in chosen.values() for n in twins if _is_near(n, address)), None)
    there = _holder(peer.host, address)
    if here and there and there.mac:
        yield mac_check(here, address, there.mac)


def _holder(host: Host | None, address: IPv4Address | None) -> Netdev | None:
    netdevs = host.netdevs if host else ()
    return next((n for n in netdevs if any(e.ip == address for e in n.ipv4)), None)


def _untried(chosen: Cages, addresses: Sequence[IPv4Address], *, live: bool) -> Iterator[Finding]:
    """Yield the interfaces whose way to a peer was not tried."""
    halves = [netdev for twins in chosen.values() for netdev in twins]
    everywhere = not any(netdev.ipv4 for netdev in halves)
    untried = [
        netdev.name
        for netdev in halves
        # From an interface without an address there is no way.
        if (netdev.ipv4 or everywhere) and not (live and _any_near(netdev, addresses))
    ]
    names = ", ".join(untried)
    if names and live:
        hint = "--peer with the peer's address there, or all at once: --ssh, --peer-probe"
        yield unknown(names, "way to a peer", "no peer's address is known", hint)
    elif names:
        yield unknown(names, "way to a peer", "these facts are of another machine")


def _devices(host: Host, chosen: Cages) -> Iterator[tuple[Netdev, str]]:
    named = {each.netdev: each.name for each in host.rdma}
    for twins in chosen.values():
        yield from ((netdev, named[netdev.name]) for netdev in twins if netdev.name in named)


def _device_at(host: Host | None, address: IPv4Address | None) -> str:
    """Return the peer's RDMA device behind an address, "" if unknown."""
    netdev = _holder(host, address)
    devices = host.rdma if host and netdev else ()
    return next((d.name for d in devices if netdev and d.netdev == netdev.name), "")
