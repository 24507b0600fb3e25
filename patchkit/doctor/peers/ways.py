"""Judge the ways between nodes: routes, echoes, frames of the full MTU, ssh. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Address

from patchkit.cluster.agent.ways import Way
from patchkit.cluster.ssh.failure import sent_error
from patchkit.cluster.ssh.ssh import advice, there
from patchkit.doctor.peers.check import fine, unknown, wrong
from patchkit.doctor.peers.ends import CableEnd
from patchkit.finding import Finding
from patchkit.runtime.host.host import Netdev
from patchkit.runtime.host.network_facts import facts as network
from patchkit.runtime.host.ping import HEADERS

_CHECKS = ("route", "way", "mtu")


def way_findings(ends: Sequence[CableEnd]) -> Iterator[Finding]:
    """Yield how the ways between the head, the first end, and each worker are, both ways."""
    head, *workers = ends
    for end in workers:
        if head.mtu and end.mtu and head.mtu != end.mtu:
            yield _mtu_differs(head, end)
    yield from _from(head, workers)
    for end in workers:
        yield from _from(end, [head])
    yield from _links(head, workers)


def _mtu_differs(head: CableEnd, end: CableEnd) -> Finding:
    """Return that two MTUs differ; at fault is the one that is not as `net plan` makes it."""
    planned = network()["plan"]["mtu"]
    smaller, larger = sorted((head, end), key=lambda each: each.mtu)
    odd, right = (larger, smaller) if smaller.mtu == planned else (smaller, larger)
    netdev = odd.holder.name if odd.holder else ""
    words = ("sudo", "ip", "link", "set", netdev, "mtu", str(right.mtu))
    return wrong(
        "mtu",
        odd.name,
        what=f"{netdev} has an MTU of {odd.mtu}, and {right.name} one of {right.mtu}",
        command=there(odd.name, *words),
    )


def _from(end: CableEnd, peers: Sequence[CableEnd]) -> Iterator[Finding]:
    """Yield how the ways from a node are."""
    known = {each.name: each for each in peers}
    tried = [(known[name], way) for name, way in end.node.ways or () if name in known]
    reason = end.out
    if not reason and not tried:
        not_asked = "no address of another node is known"
        reason = end.node.why_not("ways") if end.node.ways is None else not_asked
    if reason or not tried:
        yield from (unknown(about, end.name, reason) for about in _CHECKS)
        return
    judged = [_judged(end, peer, way) for peer, way in tried]
    for about in _CHECKS:
        found = list(dict.fromkeys(each[about] for each in judged if about in each))
        yield from found
        if not found:
            names = ", ".join(dict.fromkeys(peer.name for peer, _way in tried))
            netdevs = ", ".join(dict.fromkeys(way.netdev for _peer, way in tried))
            yield fine(about, end.name, others=names, netdevs=netdevs, mtu=end.mtu)


def _judged(end: CableEnd, peer: CableEnd, way: Way) -> Mapping[str, Finding]:
    """Return by check what is wrong with one way, or why that is not known."""

    def unsure(reason: str, *checks: str) -> dict[str, Finding]:
        return {about: unknown(about, end.name, reason) for about in checks}

    netdev = _in_network(end, way.address)
    fields = {"other": peer.name, "address": way.address}
    ping = ("ping", "-c", "3", "-I", way.netdev, way.address)
    if peer.out or not way.netdev:
        return unsure(peer.out or way.said, *_CHECKS)
    if netdev and (way.netdev != netdev.name or way.gateway):
        fields["command"] = there(end.name, "ip", "route", "get", way.address)
        seen = way.netdev + (f", by way of {way.gateway}" if way.gateway else "")
        found = wrong("route", end.name, seen=seen, netdev=netdev.name, **fields)
        return {"route": found, **unsure(f"packets for {peer.name} go elsewhere", "way", "mtu")}
    if way.plain == "unknown":
        return unsure(way.said, "way", "mtu")
    if way.plain == "silent":
        fields["command"] = there(end.name, *ping)
        found = wrong("way", end.name, netdev=way.netdev, **fields)
        return {"way": found, **unsure(f"{peer.name} does not answer", "mtu")}
    if end.mtu != peer.mtu:
        return unsure(f"{peer.name} has another MTU", "mtu")
    if way.full == "silent":
        what = f"frames of {way.mtu} bytes do not arrive at {peer.name} ({way.address})"
        large = ("-M", "do", "-s", str(way.mtu - HEADERS))
        command = there(end.name, *ping[:3], *large, *ping[3:])
        return {"mtu": wrong("mtu", f"{end.name}, {peer.name}", what=what, command=command)}
    return unsure(way.said, "mtu") if way.full == "unknown" else {}


def _in_network(end: CableEnd, address: str) -> Netdev | None:
    """Return the one interface that is in an address's network, else that of the node's own."""
    ip, host = IPv4Address(address), end.node.facts.host if end.node.facts else None
    netdevs = host.netdevs if host else ()
    near = [each for each in netdevs if any(ip in own.network for own in each.ipv4)]
    return near[0] if len(near) == 1 else end.holder


def _links(head: CableEnd, workers: Sequence[CableEnd]) -> Iterator[Finding]:
    """Yield which workers the head reaches by ssh."""
    if head.node.links is None:
        yield unknown("link", head.name, head.node.why_not("links"))
        return
    reached = []
    for end, link in zip(workers, head.node.links, strict=False):
        if not link.error:
            reached.append(end.name)
        elif head.out or end.out:
            yield unknown("link", head.name, head.out or end.out)
        else:
            error = sent_error(link.error, f"from {head.name}")
            why, hint = advice(error.what, end.name)
            yield wrong(
                "link", head.name, what=error.what, why=f"; {why}", hint=f"on {head.name}: {hint}"
            )
    if reached:
        yield fine("link", head.name, others=", ".join(reached))
