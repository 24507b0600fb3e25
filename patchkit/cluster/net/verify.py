"""Verify the QSFP network of this host, with a peer or alone. No rights needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address

from patchkit.cluster.agent.links import Way, try_ways
from patchkit.cluster.agent.node_facts import NodeFacts, look_at_node
from patchkit.cluster.net.checks import (
    check_failed,
    check_unknown,
    host_checks,
    judge,
    pair_checks,
)
from patchkit.cluster.net.plan import Cages
from patchkit.cluster.ssh.node import Remote
from patchkit.finding import Finding
from patchkit.quoting import quoted
from patchkit.records import record
from patchkit.runtime.host.host import Host, Netdev


def ask_peer_facts(destination: str, venv: str) -> Host:
    """Ask a peer that ssh reaches; ``venv`` is that of vLLM there."""
    return Remote(destination).call(NodeFacts, look_at_node, name="patchkit", venv=venv).host


def verify_network(
    host: Host,
    chosen: Cages,
    peer: Host | None,
    addresses: Sequence[IPv4Address],
    *,
    live: bool,
) -> Iterator[Finding]:
    """Yield all checks. ``live``: the facts are this machine's, so its network can be tried.

    ``addresses`` are the peer's that the user named, beside those of its facts in our networks.
    """
    yield from host_checks(host, chosen)
    if peer:
        yield from pair_checks(chosen, peer)
    halves = [netdev for twins in chosen.values() for netdev in twins]
    known = [
        address.ip
        for netdev in (peer.netdevs if peer else ())
        for address in netdev.lasting
        # The peer may have others, on its LAN for example.
        if any(_is_near(h, address.ip) and not _has_address(h, address.ip) for h in halves)
    ]
    targets = tuple(dict.fromkeys((*addresses, *known)))
    for way in record(tuple[Way, ...], try_ways(list(map(str, targets)))) if live else ():
        yield from _check_way(host, halves, way)
    everywhere = not any(netdev.ipv4 for netdev in halves)
    untried = ", ".join(
        netdev.name
        for netdev in halves
        # From an interface without an address there is no way.
        if (netdev.ipv4 or everywhere)
        and not (live and any(_is_near(netdev, address) for address in targets))
    )
    if untried and live:
        hint = "--peer with the peer's address there, or all at once: --ssh"
        yield check_unknown(untried, "way to a peer", "no peer's address is known", hint)
    elif untried:
        yield check_unknown(untried, "way to a peer", "these facts are of another machine")


def _has_address(netdev: Netdev, address: IPv4Address) -> bool:
    return any(own.ip == address for own in netdev.ipv4)


def _is_near(netdev: Netdev, address: IPv4Address) -> bool:
    return any(address in own.network for own in netdev.ipv4)


def _check_way(host: Host, halves: list[Netdev], way: Way) -> Iterator[Finding]:
    """Check the way to one address of a peer, with small packets and with frames of its MTU."""
    where = way.address
    peer = IPv4Address(where)
    netdev = next((half for half in halves if _is_near(half, peer)), None)
    if any(_has_address(own, peer) for own in host.netdevs):
        yield check_failed(where, "same network", "is an address of this host", "name the peer's")
        return
    ours = ", ".join(str(own.network) for half in halves for own in half.ipv4)
    seen = f"that of {netdev.name}" if netdev else f"is in none of {ours or 'ours'}"
    hint = f"give both nodes addresses in one network, here one of {ours or 'none'}"
    yield judge(netdev is not None, where, "same network", seen, hint)
    untried = "the route is not known"
    if way.netdev:
        seen = f"through {way.netdev}" + (f", by way of {way.gateway}" if way.gateway else "")
        right = netdev is not None and way.netdev == netdev.name and not way.gateway
        untried = "" if right else "the way is not the QSFP's; what would answer is not it"
        shown = seen if right else f"{seen}, not {netdev.name if netdev else 'a QSFP interface'}"
        yield judge(right, where, "route", shown, "`ip route` shows who says so")
    else:
        yield check_unknown(where, "route", f"ip: {way.said}", "sudo apt install iproute2")
    there = "is the peer up and configured, and the cable not crossed? `patchkit net verify` there"
    mtu = f"the same MTU on both ends and on the switch; here {way.netdev} has {way.mtu}"
    for about, outcome, hint in (
        ("echo", way.plain, there),
        (f"{way.mtu}-byte frames" if way.mtu else "jumbo frames", way.full, mtu),
    ):
        if untried or outcome == "unknown":
            ping = quoted("sudo", "ping", "-M", "do", "-I", way.netdev or "DEVICE", where)
            hint = "" if untried else f"{ping}; without it: sudo apt install iputils-ping"
            yield check_unknown(where, about, untried or way.said, hint)
        else:
            seen = "came back" if outcome == "answers" else way.said or "no answer"
            yield judge(outcome == "answers", where, about, seen, hint)
