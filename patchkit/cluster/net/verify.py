"""Verify the QSFP network of this host, with a peer or alone. No rights needed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address
from pathlib import Path

from patchkit.cluster.agent.node_facts import NodeFacts, look_at_node
from patchkit.cluster.net.checks import (
    check_failed,
    check_unknown,
    host_checks,
    judge,
    net_finding,
    pair_checks,
)
from patchkit.cluster.net.live import run_ip
from patchkit.cluster.net.plan import Cages
from patchkit.cluster.ssh.node import Remote
from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.quoting import quoted
from patchkit.reading import read_text
from patchkit.runtime.host.host import Host, Netdev, from_json
from patchkit.runtime.host.ping import HEADERS, PLAIN, echo, ping_obstacle

# States of a neighbour whose MAC is resolved: ip-neighbour(8).
_KNOWN = {"REACHABLE", "STALE", "DELAY", "PROBE", "PERMANENT"}


def read_peer_facts(path: Path) -> Host:
    """Return the facts in a file. Raises UsageError, SourceError or StorageError."""
    text = read_text(path, hint="write it on the peer: patchkit probe --json > peer.json")
    return from_json(text, str(path))


def ask_peer_facts(destination: str, venv: str) -> Host:
    """Ask a peer that ssh reaches; ``venv`` is that of vLLM there."""
    there = Remote(destination)
    return there.call(NodeFacts, look_at_node, name="patchkit", venv=venv).host


def verify_network(
    host: Host,
    chosen: Cages,
    peer: Host | None,
    addresses: Sequence[IPv4Address],
    mtu: int | None,
    *,
    live: bool,
) -> Iterator[Finding]:
    """Yield all checks. ``live``: the facts are this machine's, so its network can be tried.

    ``addresses`` are the peer's that the user named, beside those of its facts in our networks;
    ``mtu`` is what both ends should have, None for what each has here.
    """
    yield from host_checks(host, chosen, mtu)
    if peer:
        yield from pair_checks(host, chosen, peer)
    halves = [netdev for twins in chosen.values() for netdev in twins]
    known = [
        address.ip
        for netdev in (peer.netdevs if peer else ())
        for address in netdev.lasting
        # The peer may have others, on its LAN for example.
        if any(_is_near(h, address.ip) and not _has_address(h, address.ip) for h in halves)
    ]
    targets = tuple(dict.fromkeys((*addresses, *known)))
    for address in targets if live else ():
        yield from _check_way(host, halves, address, mtu)
    everywhere = not any(netdev.ipv4 for netdev in halves)
    untried = ", ".join(
        netdev.name
        for netdev in halves
        # From an interface without an address there is no way.
        if (netdev.ipv4 or everywhere)
        and not (live and any(_is_near(netdev, address) for address in targets))
    )
    if untried and live:
        hint = "--peer with the peer's address there, or all at once: --ssh, --peer-probe"
        yield check_unknown(untried, "way to a peer", "no peer's address is known", hint)
    elif untried:
        yield check_unknown(untried, "way to a peer", "these facts are of another machine")


def _has_address(netdev: Netdev, address: IPv4Address) -> bool:
    return any(own.ip == address for own in netdev.ipv4)


def _is_near(netdev: Netdev, address: IPv4Address) -> bool:
    return any(address in own.network for own in netdev.ipv4)


def _check_way(
    host: Host, halves: list[Netdev], peer: IPv4Address, mtu: int | None
) -> Iterator[Finding]:
    """Check the way to one address of a peer, with frames of ``mtu``, or of the interface's own."""
    where = str(peer)
    netdev = next((half for half in halves if _is_near(half, peer)), None)
    if any(_has_address(own, peer) for own in host.netdevs):
        yield check_failed(where, "same network", "is an address of this host", "name the peer's")
        return
    ours = ", ".join(str(own.network) for half in halves for own in half.ipv4)
    seen = f"that of {netdev.name}" if netdev else f"is in none of {ours or 'ours'}"
    hint = f"give both nodes addresses in one network, here one of {ours or 'none'}"
    yield judge(netdev is not None, where, "same network", seen, hint)
    route = _check_route(where, netdev)
    yield route
    if netdev is None or route.level is not Level.OK:
        seen = "the way is not the QSFP's; what would answer is not it"
        if route.level is Level.UNKNOWN:
            seen = "the route is not known"
        for about in ("echo", "jumbo frames", "neighbour"):
            yield check_unknown(where, about, seen)
        return
    plain = _check_echo(netdev, where, PLAIN, "echo")
    yield plain
    frame = mtu or netdev.mtu
    yield _check_echo(netdev, where, frame - HEADERS, f"{frame}-byte frames")
    # After the echo, which makes the kernel resolve the address.
    mac = _find_macs(where).get(netdev.name)
    if plain.level is Level.UNKNOWN and not mac:
        yield check_unknown(where, "neighbour", "nothing was sent that would make it answer")
    else:
        seen = f"{mac or 'nobody'} answers for it at {netdev.name}"
        yield judge(bool(mac), where, "neighbour", seen, "the cables")
    # Where the cables are swapped, it answers at another interface.
    for other in halves if plain.level is Level.ERROR else ():
        if other.name != netdev.name and other.carrier:
            _check_echo(other, where, PLAIN, "echo")
            if other.name in _find_macs(where):
                seen = f"answers at {other.name}, not at {netdev.name}"
                yield check_failed(where, "cabling", seen, "swap the cables of one node")
                return


def _check_route(peer: str, netdev: Netdev | None) -> Finding:
    """Check that the kernel sends through the interface of the peer's network, and directly."""
    if not shutil.which("ip"):
        return check_unknown(peer, "route", "ip is not installed", "sudo apt install iproute2")
    try:
        answer = next(iter(run_ip("route", "get", peer)), {})
    except HostError as error:
        return check_failed(peer, "route", str(error), "give the QSFP interface its address")
    seen = f"through {answer.get('dev')}"
    if "gateway" in answer:
        seen += f", by way of {answer['gateway']}"
    elif netdev and answer.get("dev") == netdev.name:
        return net_finding(Level.OK, peer, "route", seen)
    right = netdev.name if netdev else "a QSFP interface"
    return check_failed(peer, "route", f"{seen}, not {right}", "`ip route` shows who says so")


def _check_echo(netdev: Netdev, peer: str, size: int, about: str) -> Finding:
    """Send packets of that many bytes of payload, unfragmented, and wait for one to come back.

    The exit status of ping decides; its words differ between versions and are only shown.
    """
    if obstacle := ping_obstacle():
        return check_unknown(peer, about, obstacle, "sudo apt install iputils-ping")
    done = echo(netdev.name, peer, size)
    words = next(iter(done.errors.strip().splitlines()), "")
    if done.trouble and done.status != 1:  # iputils: 1 is for sent, and nothing came back
        seen = words or f"ping: {done.trouble}"
        return check_unknown(peer, about, seen, quoted("sudo", *done.command))
    hint = f"the same MTU on both ends and on the switch; here {netdev.name} has {netdev.mtu}"
    if size == PLAIN:
        hint = "is the peer up and configured? `patchkit net verify` there"
    seen = f"{size} bytes: {words or 'no answer'}" if done.trouble else f"{size} bytes came back"
    return judge(not done.trouble, peer, about, seen, hint)


def _find_macs(peer: str) -> dict[str, str]:
    """Return the interfaces where a neighbour has that address → its MAC."""
    try:
        entries = run_ip("neighbour", "show", peer)
    except HostError:
        return {}
    return {
        entry["dev"]: entry["lladdr"]
        for entry in entries
        if "lladdr" in entry and _KNOWN & set(entry.get("state", ()))
    }
