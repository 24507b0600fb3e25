"""Compare the QSFP networks of two hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Network

from patchkit.cluster.net.cages import Cages, cages
from patchkit.cluster.net.checks import (
    REPLAN,
    check_failed,
    check_passed,
    check_unknown,
    check_warned,
)
from patchkit.finding import Finding
from patchkit.quoting import quoted
from patchkit.runtime.host.hardware import network_facts
from patchkit.runtime.host.host import Host, Netdev, Software

_PACKAGES = ("vllm", "torch", "triton", "ray")


def pair_checks(host: Host, chosen: Cages, peer: Host) -> Iterator[Finding]:
    """Yield how both ends compare: networks, MTU, addresses, twins, versions."""
    pairs = list(_find_pairs(chosen, peer))
    if not pairs:
        yield check_failed("both ends", "networks", "there is no address to compare", REPLAN)
    ours = {twin.name: "AB"[n] for twins in chosen.values() for n, twin in enumerate(twins[:2])}
    theirs = {twin.name: "AB"[n] for twins in cages(peer).values() for n, twin in enumerate(twins)}
    for netdev, network, others in pairs:
        where = f"{netdev.name} {network}"
        if len(others) != 1:
            seen = ", ".join(other.name for other in others) or "no interface"
            hint = f"on the peer: {quoted('patchkit', 'net', 'plan', '--network', str(network))}"
            yield check_failed(where, "peer's end", f"{seen} of the peer is in it", hint)
            continue
        (other,) = others
        yield check_passed(where, "peer's end", f"{other.name} of the peer is in it")
        if netdev.mtu == other.mtu:
            yield check_passed(where, "equal MTU", str(netdev.mtu))
        else:
            seen = f"{netdev.mtu} here, {other.mtu} at the peer's {other.name}"
            hint = "`patchkit net apply`, with the same --mtu on both nodes"
            yield check_failed(where, "equal MTU", seen, hint)
        here, there = ours.get(netdev.name, ""), theirs.get(other.name, "")
        both = f"{netdev.name} and {other.name}"
        if not there:
            yield check_unknown(both, "same twin", "the peer's interface has no RDMA device")
        elif here == there:
            yield check_passed(both, "same twin", f"{here} at both ends")
        else:
            hint = "give the halves of one node each other's addresses"
            yield check_warned(both, "same twin", f"{here} here, {there} there", hint)
    yield from _check_ring_ports(chosen, peer, pairs)
    own = {address for twins in chosen.values() for n in twins for address in n.ipv4}
    twice = sorted(
        address.ip
        for netdev in peer.netdevs
        for address in netdev.ipv4
        if address.ip in {mine.ip for mine in own}
    )
    if twice:
        hint = "each node has a --node number of its own; or these are facts of the same machine"
        seen = f"{', '.join(map(str, twice))} on both hosts"
        yield check_failed("both ends", "addresses", seen, hint)
    else:
        yield check_passed("both ends", "addresses", "none is on both hosts")
    yield from _check_versions(host.software, peer.software)


_Pair = tuple[Netdev, IPv4Network, tuple[Netdev, ...]]


def _find_pairs(chosen: Cages, peer: Host) -> Iterator[_Pair]:
    """Yield each own network with the peer's interfaces in it; a ring's other link is left out."""
    for twins in chosen.values():
        rows = []
        for netdev in twins:
            for network in (address.network for address in netdev.lasting):
                others = (p for p in peer.netdevs if any(a.network == network for a in p.ipv4))
                rows.append((netdev, network, tuple(others)))
        if len(chosen) == 1 or any(others for _, _, others in rows):
            yield from rows


def _check_ring_ports(chosen: Cages, peer: Host, pairs: list[_Pair]) -> Iterator[Finding]:
    """Check that a ring's cable leads from port 0 to port 1. A single cable may lead anywhere."""
    links = {(netdev.cage, other.cage) for netdev, _, others in pairs for other in others[:1]}
    for ends in (chosen, cages(peer)):
        if sum(any(twin.ipv4 for twin in twins) for twins in ends.values()) < 2:
            return
    if len(links) != 1:
        return
    here, there = links.pop()
    seen = f"port {here} here leads to port {there} there"
    if here != there:
        yield check_passed("both ends", "ports", seen)
    else:
        hint = "swap the two cables of one of the nodes, and their addresses with them"
        cabling = network_facts()["owners"]["triangle"]
        yield check_warned("both ends", "ports", f"{seen}; {cabling}", hint)


def _check_versions(ours: Software | None, theirs: Software | None) -> Iterator[Finding]:
    """Compare what must be equal on all nodes, NCCL first: releases that differ cannot talk."""
    if ours is None or theirs is None:
        seen = f"unknown {'here' if ours is None else 'at the peer'}"
        yield check_unknown("both ends", "versions", seen, "patchkit probe --json --python PYTHON")
        return
    for name, here, there in (
        ("NCCL of vLLM", *(s.vllm_nccl.version if s.vllm_nccl else "" for s in (ours, theirs))),
        ("NCCL of torch", *(s.torch_nccl.version if s.torch_nccl else "" for s in (ours, theirs))),
        *((name, getattr(ours, name), getattr(theirs, name)) for name in _PACKAGES),
    ):
        seen = f"{here or 'none'} here, {there or 'none'} at the peer"
        if not here and not there:
            yield check_unknown("both ends", name, "not installed at either end")
        elif here == there:
            yield check_passed("both ends", name, here)
        else:
            yield check_warned("both ends", name, seen, f"install the same {name} on all nodes")
