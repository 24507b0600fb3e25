"""Try the way to a peer: route, echo, jumbo frames, neighbour. No rights needed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from ipaddress import IPv4Address

from patchkit.cluster.net.cages import Cages
from patchkit.cluster.net.checks import failed, passed, unknown
from patchkit.cluster.net.live import ip
from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.host.ping import HEADERS, PLAIN, echo, ping_obstacle

# States of a neighbour whose MAC is resolved: ip-neighbour(8).
_KNOWN = {"REACHABLE", "STALE", "DELAY", "PROBE", "PERMANENT"}


def path_checks(host: Host, chosen: Cages, peer: IPv4Address, mtu: int | None) -> Iterator[Finding]:
    """Check the way to one address of a peer, with frames of ``mtu``, or of the interface's own."""
    interfaces = [netdev for twins in chosen.values() for netdev in twins]
    netdev = next((n for n in interfaces if any(peer in e.network for e in n.ipv4)), None)
    if any(peer == each.ip for n in host.netdevs for each in n.ipv4):
        yield failed(str(peer), "same network", "is an address of this host", "name the peer's")
        return
    yield _same_network(chosen, peer, netdev)
    route = _route(peer, netdev)
    yield route
    if netdev is None or route.level is not Level.OK:
        seen = "the way is not the QSFP's; what would answer is not it"
        if route.level is Level.UNKNOWN:
            seen = "the route is not known"
        for what in ("echo", "jumbo frames", "neighbour"):
            yield unknown(str(peer), what, seen)
        return
    plain = _echo(netdev, peer, PLAIN, "echo")
    yield plain
    frame = mtu or netdev.mtu
    yield _echo(netdev, peer, frame - HEADERS, f"{frame}-byte frames")
    # After the echo, which makes the kernel resolve the address.
    yield _neighbour(netdev, peer, asked=plain.level is not Level.UNKNOWN)
    if plain.level is Level.ERROR:
        yield from _elsewhere(chosen, netdev, peer)


def mac_check(netdev: Netdev, peer: IPv4Address, expected: str) -> Finding:
    """Check that the neighbour is the interface that the peer's facts name, not another host's."""
    found = _macs(peer).get(netdev.name, "")
    if not found:
        return unknown(str(peer), "neighbour's MAC", f"{netdev.name} knows no neighbour there")
    if found == expected:
        return passed(str(peer), "neighbour's MAC", f"{found}, as the peer says")
    return failed(
        str(peer),
        "neighbour's MAC",
        f"{found}, the peer's is {expected}",
        "another interface answers: give the twins different networks, and look for a third host",
    )


def _same_network(chosen: Cages, peer: IPv4Address, netdev: Netdev | None) -> Finding:
    if netdev:
        return passed(str(peer), "same network", f"that of {netdev.name}")
    ours = ", ".join(str(e.network) for twins in chosen.values() for n in twins for e in n.ipv4)
    return failed(
        str(peer),
        "same network",
        f"in none of {ours or 'no network'}",
        "`patchkit net plan`, with the same --network on both nodes",
    )


def _route(peer: IPv4Address, netdev: Netdev | None) -> Finding:
    """Check where the kernel sends a packet for the peer."""
    if not shutil.which("ip"):
        return unknown(str(peer), "route", "ip is not installed", "sudo apt install iproute2")
    try:
        (answer,) = ip("route", "get", str(peer))
    except (HostError, ValueError) as error:
        return failed(str(peer), "route", str(error), "give the QSFP interface its address")
    seen = f"through {answer.get('dev')}"
    if "gateway" in answer:
        seen += f", by way of {answer['gateway']}"
    if netdev and answer.get("dev") == netdev.name and "gateway" not in answer:
        return passed(str(peer), "route", seen)
    wanted = netdev.name if netdev else "a QSFP interface"
    return failed(str(peer), "route", f"{seen}, not {wanted}", "`ip route` shows who says so")


def _echo(netdev: Netdev, peer: IPv4Address, size: int, what: str) -> Finding:
    """Send packets of that many bytes of payload, unfragmented, and wait for one to come back.

    The exit status of ping decides; its words differ between versions and are only shown.
    """
    if obstacle := ping_obstacle():
        return unknown(str(peer), what, obstacle, "sudo apt install iputils-ping")
    done = echo(netdev.name, str(peer), size)
    if not done.trouble:
        return passed(str(peer), what, f"{size} bytes there and back")
    words = next(iter(done.errors.strip().splitlines()), "")
    if done.status == 1:  # iputils: sent, and nothing came back; 2 is any other error
        return _no_answer(netdev, peer, size, what, words)
    seen = words or f"ping: {done.trouble}"
    return unknown(str(peer), what, seen, quoted("sudo", *done.command))


def _no_answer(netdev: Netdev, peer: IPv4Address, size: int, what: str, words: str) -> Finding:
    seen = f"{size} bytes: " + (words or "no answer")
    if size == PLAIN:
        hint = "is the peer up and configured? `patchkit net verify` there"
    else:
        hint = f"the same MTU on both ends and on the switch; here {netdev.name} has {netdev.mtu}"
    return failed(str(peer), what, seen, hint)


def _neighbour(netdev: Netdev, peer: IPv4Address, *, asked: bool) -> Finding:
    """Check that the peer's address was resolved at the right interface, and only there."""
    found = _macs(peer)
    if netdev.name in found:
        return passed(str(peer), "neighbour", f"{found[netdev.name]} at {netdev.name}")
    if not asked:
        return unknown(str(peer), "neighbour", "nothing was sent that would make it answer")
    if found:
        return failed(str(peer), "neighbour", f"known at {', '.join(found)}", "the cables")
    return failed(str(peer), "neighbour", f"nobody answers for it at {netdev.name}", "the cables")


def _macs(peer: IPv4Address) -> dict[str, str]:
    """Return the interfaces where a neighbour has that address → its MAC."""
    try:
        entries = ip("neighbour", "show", str(peer))
    except HostError:
        return {}
    return {
        each["dev"]: each["lladdr"]
        for each in entries
        if "lladdr" in each and _KNOWN & set(each.get("state", ()))
    }


def _elsewhere(chosen: Cages, netdev: Netdev, peer: IPv4Address) -> Iterator[Finding]:
    """Ask at the other cage: its neighbour answers for all its addresses, if it is the peer."""
    for cage, twins in chosen.items():
        if cage is not None and netdev.name in {each.name for each in twins}:
            continue
        for other in twins:
            if other.name == netdev.name or not other.carrier:
                continue
            _echo(other, peer, PLAIN, "echo")
            if other.name in _macs(peer):
                yield failed(
                    str(peer),
                    "cabling",
                    f"answers at {other.name}, not at {netdev.name}",
                    "swap the cables, or plan with --port0-to",
                )
                return
