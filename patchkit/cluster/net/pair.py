"""Compare the QSFP networks of two hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Network

from patchkit.cluster.net.cages import Cages, cages, letter
from patchkit.cluster.net.checks import REPLAN, failed, passed, unknown, warned
from patchkit.finding import Finding
from patchkit.quoting import quoted
from patchkit.runtime.host.host import Host, Netdev, Software
from patchkit.runtime.host.network_facts import facts

_PACKAGES = ("vllm", "torch", "triton", "ray")


def pair_checks(host: Host, chosen: Cages, peer: Host) -> Iterator[Finding]:
    """Yield how both ends compare: networks, MTU, addresses, twins, versions."""
    pairs = list(_pairs(chosen, peer))
    for netdev, network, others in pairs:
        subject = f"{netdev.name} {network}"
        if len(others) == 1:
            yield passed(subject, "peer's end", f"{others[0].name} of the peer is in it")
            yield _same_mtu(subject, netdev, others[0])
        else:
            seen = ", ".join(each.name for each in others) or "no interface"
            address = next(str(each) for each in netdev.lasting if each.network == network)
            hint = f"on the peer: {quoted('patchkit', 'net', 'plan', '--peer', address)}"
            yield failed(subject, "peer's end", f"{seen} of the peer is in it", hint)
    if not pairs:
        yield failed("both ends", "networks", "there is no address to compare", REPLAN)
    yield from _pairing(chosen, peer, pairs)
    yield from _ports(chosen, peer, pairs)
    yield _duplicates(host, chosen, peer)
    yield from _versions(host.software, peer.software)


def _pairs(chosen: Cages, peer: Host) -> Iterator[tuple[Netdev, IPv4Network, tuple[Netdev, ...]]]:
    """Yield each own network with the peer's interfaces in it; a ring's other link is left out."""
    for twins in chosen.values():
        rows = [
            (
                netdev,
                each.network,
                tuple(p for p in peer.netdevs if any(a.network == each.network for a in p.ipv4)),
            )
            for netdev in twins
            for each in netdev.lasting
        ]
        if len(chosen) == 1 or any(others for _, _, others in rows):
            yield from rows


def _same_mtu(subject: str, netdev: Netdev, other: Netdev) -> Finding:
    if netdev.mtu == other.mtu:
        return passed(subject, "equal MTU", str(netdev.mtu))
    return failed(
        subject,
        "equal MTU",
        f"{netdev.mtu} here, {other.mtu} at the peer's {other.name}",
        "`patchkit net apply`, with the same --mtu on both nodes",
    )


def _pairing(
    chosen: Cages,
    peer: Host,
    pairs: Sequence[tuple[Netdev, IPv4Network, tuple[Netdev, ...]]],
) -> Iterator[Finding]:
    """Check that twin A of one end and twin A of the other are in one network."""
    ours = {twin.name: n for twins in chosen.values() for n, twin in enumerate(twins)}
    theirs = {twin.name: n for twins in cages(peer).values() for n, twin in enumerate(twins)}
    for netdev, _network, others in pairs:
        for other in others[:1]:  # none or several is an error already
            subject, here = f"{netdev.name} and {other.name}", ours[netdev.name]
            if other.name not in theirs:
                yield unknown(subject, "same twin", "the peer's interface has no RDMA device")
            elif theirs[other.name] == here:
                yield passed(subject, "same twin", f"{letter(here)} at both ends")
            else:
                seen = f"{letter(here)} here, {letter(theirs[other.name])} there"
                hint = "give the halves of one node each other's addresses"
                yield warned(subject, "same twin", seen, hint)


def _ports(
    chosen: Cages,
    peer: Host,
    pairs: Sequence[tuple[Netdev, IPv4Network, tuple[Netdev, ...]]],
) -> Iterator[Finding]:
    """Check that a ring's cable leads from port 0 to port 1. A single cable may lead anywhere."""
    known = cages(peer)
    used = [cage for cage, twins in known.items() if any(twin.ipv4 for twin in twins)]
    links = {
        (netdev.cage, other.cage) for netdev, _network, others in pairs for other in others[:1]
    }
    in_use = [cage for cage, twins in chosen.items() if any(twin.ipv4 for twin in twins)]
    if len(used) < 2 or len(in_use) < 2 or len(links) != 1:
        return
    here, there = links.pop()
    seen = f"port {here} here leads to port {there} there"
    if here == there:
        advice = "swap the two cables of one of the nodes, and their addresses with them"
        yield warned("both ends", "ports", f"{seen}; {facts()['owners']['triangle']}", advice)
    else:
        yield passed("both ends", "ports", seen)


def _duplicates(host: Host, chosen: Cages, peer: Host) -> Finding:
    """Check that no address of a QSFP interface is also one of the other host."""
    names = {each.name for twins in chosen.values() for each in twins}
    networks = {each.network for twins in chosen.values() for n in twins for each in n.ipv4}
    ours = {each.ip for netdev in host.netdevs if netdev.name in names for each in netdev.ipv4}
    theirs = {e.ip for n in peer.netdevs for e in n.ipv4 if any(e.ip in net for net in networks)}
    both = ", ".join(map(str, sorted(ours & theirs)))
    if both:
        hint = "each node has a --node number of its own; or these are facts of the same machine"
        return failed("both ends", "addresses", f"{both} on both hosts", hint)
    return passed("both ends", "addresses", "none is on both hosts")


def _versions(ours: Software | None, theirs: Software | None) -> Iterator[Finding]:
    """Compare what must be equal on all nodes, NCCL first: releases that differ cannot talk."""
    if ours is None or theirs is None:
        seen = f"unknown {'here' if ours is None else 'at the peer'}"
        yield unknown("both ends", "versions", seen, "patchkit probe --json --python PYTHON")
        return
    for name, here, there in (
        ("NCCL of vLLM", *(s.vllm_nccl.version if s.vllm_nccl else "" for s in (ours, theirs))),
        ("NCCL of torch", *(s.torch_nccl.version if s.torch_nccl else "" for s in (ours, theirs))),
        *((name, getattr(ours, name), getattr(theirs, name)) for name in _PACKAGES),
    ):
        seen = f"{here or 'none'} here, {there or 'none'} at the peer"
        if not here and not there:
            yield unknown("both ends", name, "not installed at either end")
        elif here == there:
            yield passed("both ends", name, here)
        else:
            yield warned("both ends", name, seen, f"install the same {name} on all nodes")
