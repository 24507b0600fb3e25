"""Judge the cable between nodes: its ends, the networks beside it, the ways both ways. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address

from patchkit.cluster.agent.links import Way
from patchkit.cluster.ssh.failure import sent_error
from patchkit.cluster.ssh.ssh import advice, there
from patchkit.doctor.peers.check import NotCheckedError, check, fine, require, unknown, wrong
from patchkit.doctor.peers.report import NodeReport
from patchkit.finding import Finding
from patchkit.runtime.host.hardware import network_facts as network
from patchkit.runtime.host.host import Netdev
from patchkit.runtime.host.networks import overlaps
from patchkit.runtime.host.ping import HEADERS

_CHECKS = ("route", "way", "mtu")
_NAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class CableEnd:
    """A node's interface to the others; ``out`` is why nothing can be tried through it."""

    report: NodeReport
    netdevs: tuple[Netdev, ...]
    out: str

    @property
    def node(self) -> str:
        """Return the node's name."""
        return self.report.node

    @property
    def holder(self) -> Netdev | None:
        """Return the interface that has the node's address."""
        return _holding_netdev(self.report)

    @property
    def mtu(self) -> int:
        """Return the MTU of that interface, 0 if it is not known."""
        return self.holder.mtu if self.holder else 0


def cable_findings(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield what each node's end of the cable is like, and how the ways between them are."""
    ends = [_cable_end(node, nodes) for node in nodes]
    for end in ends:
        yield from check_cable(end)
        yield from check_address(end, ends)
        yield from check_address_twice(end, ends)
        yield from check_networks(end)
    # Of the ways between the head, the first end, and each worker: both directions.
    head, *workers = ends
    for end in workers:
        if head.mtu and end.mtu and head.mtu != end.mtu:
            yield _mtu_differs(head, end)
    yield from check_ways(head, workers)
    for end in workers:
        yield from check_ways(end, [head])
    yield from check_links(head, workers)


def _cable_end(node: NodeReport, nodes: Sequence[NodeReport]) -> CableEnd:
    if node.facts is None:
        return CableEnd(report=node, netdevs=(), out=node.why_not("facts"))
    host, variables = node.facts.host, {}
    if node.placed and node.placed.env:
        variables = dict(node.placed.env.variables)
    named = [each for name in _NAMES for each in variables.get(name, "").lstrip("=").split(",")]
    holder = _holding_netdev(node)
    names = dict.fromkeys([*filter(None, named), *([holder.name] if holder else [])])
    netdevs = tuple(each for name in names if (each := host.netdev(name)))
    dark = [each.name for each in netdevs if not (each.up and each.carrier)]
    out = f"{', '.join(dark)} of {node.node} has no carrier" if dark else ""
    if not out and not holder:
        out = f"{node.node} has no address in the cluster's network"
    if taken := next(_taken_addresses(node, nodes), None):
        out = f"{node.node} has the address of {taken[0].node}"
    elif not out and holder and next(overlaps(host, [holder.name]), None):
        out = f"{node.node} has two interfaces in one network"
    return CableEnd(report=node, netdevs=netdevs, out=out)


@check("cable")
def check_cable(end: CableEnd) -> Iterator[Finding]:
    dark = [netdev for netdev in end.netdevs if not (netdev.up and netdev.carrier)]
    for netdev in dark:
        state = f"{netdev.state}, {'a' if netdev.carrier else 'no'} carrier"
        command = there(end.node, "ip", "-brief", "link", "show", netdev.name)
        yield wrong("cable", end.node, netdev=netdev.name, state=state, command=command)
    if not end.netdevs:
        raise NotCheckedError(end.out or "no interface of the cluster is known")
    if not dark:
        yield fine("cable", end.node, netdevs=", ".join(each.name for each in end.netdevs))


@check("address")
def check_address(end: CableEnd, ends: Sequence[CableEnd]) -> Iterator[Finding]:
    report, holder = end.report, end.holder
    known = report.facts is not None
    if known and holder and not report.no_address:
        yield fine("address", end.node, address=report.address, netdev=holder.name)
    elif not known or holder or any(not each.carrier for each in end.netdevs):
        raise NotCheckedError(end.out)
    else:
        error = report.no_address
        yield wrong(
            "address",
            end.node,
            what=error.what if error else f"no interface has {report.address}",
            why=error.why if error and error.why else "the others look for this node there",
            command=_give_address_command(end, ends) or (error.hint if error else ""),
        )


def _give_address_command(end: CableEnd, ends: Sequence[CableEnd]) -> str:
    """Return the command that gives a node its former address back, "" where that is not known."""
    first = ends[0].holder
    own = [each for each in (first.ipv4 if first else ()) if str(each.ip) == ends[0].report.address]
    if not (own and end.report.address and end.netdevs):
        return ""
    address = f"{end.report.address}/{own[0].network.prefixlen}"
    words = ("ip", "address", "add", address, "dev", end.netdevs[0].name)
    return there(end.node, "sudo", *words)


@check("address-twice")
def check_address_twice(end: CableEnd, ends: Sequence[CableEnd]) -> Iterator[Finding]:
    """Yield which addresses of others this node has as well."""
    require(end.report.facts, end.out)
    taken = list(_taken_addresses(end.report, [each.report for each in ends]))
    for other, netdev, own in taken:
        yield wrong(
            "address-twice",
            end.node,
            address=other.address,
            netdev=netdev,
            other=other.node,
            command=there(end.node, "sudo", "ip", "address", "del", own, "dev", netdev),
        )
    if not taken:
        yield fine("address-twice", end.node)


def _taken_addresses(
    node: NodeReport, nodes: Sequence[NodeReport]
) -> Iterator[tuple[NodeReport, str, str]]:
    """Yield whose address a node has as well, at which interface, with its prefix."""
    host = node.facts.host if node.facts else None
    for netdev in host.netdevs if host else ():
        for own in netdev.ipv4:
            for other in nodes:
                if other is not node and str(own.ip) == other.address:
                    yield other, netdev.name, str(own)


@check("networks")
def check_networks(end: CableEnd) -> Iterator[Finding]:
    holder = require(end.holder, end.out or "it has no address")
    facts = require(end.report.facts, end.out)
    clashes = list(overlaps(facts.host, [holder.name]))
    for each in clashes:
        words = ("ip", "address", "del", str(each.present), "dev", each.other.name)
        yield wrong(
            "networks",
            end.node,
            netdev=holder.name,
            address=each.address,
            other=each.other.name,
            present=each.present,
            command=there(end.node, "sudo", *words),
        )
    if not clashes:
        yield fine("networks", end.node, netdev=holder.name)


def _holding_netdev(node: NodeReport) -> Netdev | None:
    netdevs = node.facts.host.netdevs if node.facts and node.address else ()
    for netdev in netdevs:
        if any(str(each.ip) == node.address for each in netdev.ipv4):
            return netdev
    return None


def _mtu_differs(head: CableEnd, end: CableEnd) -> Finding:
    """Return that two MTUs differ; at fault is the one that is not as `net plan` makes it."""
    planned = network()["plan"]["mtu"]
    smaller, larger = sorted((head, end), key=lambda each: each.mtu)
    odd, right = (larger, smaller) if smaller.mtu == planned else (smaller, larger)
    netdev = odd.holder.name if odd.holder else ""
    words = ("sudo", "ip", "link", "set", netdev, "mtu", str(right.mtu))
    return wrong(
        "mtu",
        odd.node,
        what=f"{netdev} has an MTU of {odd.mtu}, and {right.node} one of {right.mtu}",
        command=there(odd.node, *words),
    )


@check(*_CHECKS)
def check_ways(end: CableEnd, peers: Sequence[CableEnd]) -> Iterator[Finding]:
    """Yield how the ways from a node are."""
    if end.out:
        raise NotCheckedError(end.out)
    ways = require(end.report.ways, end.report.why_not("ways"))
    known = {peer.node: peer for peer in peers}
    tried = [(known[name], way) for name, way in ways if name in known]
    if not tried:
        raise NotCheckedError("no address of another node is known")
    judged = [_judge_way(end, peer, way) for peer, way in tried]
    for about in _CHECKS:
        found = list(dict.fromkeys(each[about] for each in judged if about in each))
        yield from found
        if not found:
            names = ", ".join(dict.fromkeys(peer.node for peer, _way in tried))
            netdevs = ", ".join(dict.fromkeys(way.netdev for _peer, way in tried))
            yield fine(about, end.node, others=names, netdevs=netdevs, mtu=end.mtu)


def _judge_way(end: CableEnd, peer: CableEnd, way: Way) -> Mapping[str, Finding]:
    """Return by check what is wrong with one way, or why that is not known."""

    def unsure(reason: str, *checks: str) -> dict[str, Finding]:
        return {about: unknown(about, end.node, reason) for about in checks}

    netdev = _expected_netdev(end, way.address)
    fields = {"other": peer.node, "address": way.address}
    ping = ("ping", "-c", "3", "-I", way.netdev, way.address)
    if peer.out or not way.netdev:
        return unsure(peer.out or way.said, *_CHECKS)
    if netdev and (way.netdev != netdev.name or way.gateway):
        fields["command"] = there(end.node, "ip", "route", "get", way.address)
        seen = way.netdev + (f", by way of {way.gateway}" if way.gateway else "")
        found = wrong("route", end.node, seen=seen, netdev=netdev.name, **fields)
        return {"route": found, **unsure(f"packets for {peer.node} go elsewhere", "way", "mtu")}
    if way.plain == "unknown":
        return unsure(way.said, "way", "mtu")
    if way.plain == "silent":
        fields["command"] = there(end.node, *ping)
        found = wrong("way", end.node, netdev=way.netdev, **fields)
        return {"way": found, **unsure(f"{peer.node} does not answer", "mtu")}
    if end.mtu != peer.mtu:
        return unsure(f"{peer.node} has another MTU", "mtu")
    if way.full == "silent":
        what = f"frames of {way.mtu} bytes do not arrive at {peer.node} ({way.address})"
        large = ("-M", "do", "-s", str(way.mtu - HEADERS))
        command = there(end.node, *ping[:3], *large, *ping[3:])
        return {"mtu": wrong("mtu", f"{end.node}, {peer.node}", what=what, command=command)}
    return unsure(way.said, "mtu") if way.full == "unknown" else {}


def _expected_netdev(end: CableEnd, address: str) -> Netdev | None:
    """Return the one interface that is in an address's network, else that of the node's own."""
    ip, host = IPv4Address(address), end.report.facts.host if end.report.facts else None
    netdevs = host.netdevs if host else ()
    near = [each for each in netdevs if any(ip in own.network for own in each.ipv4)]
    return near[0] if len(near) == 1 else end.holder


@check("link")
def check_links(head: CableEnd, workers: Sequence[CableEnd]) -> Iterator[Finding]:
    """Yield which workers the head reaches by ssh."""
    links = require(head.report.links, head.report.why_not("links"))
    reached = []
    for end, link in zip(workers, links, strict=False):
        if not link.error:
            reached.append(end.node)
        elif head.out or end.out:
            yield unknown("link", head.node, head.out or end.out)
        else:
            error = sent_error(link.error, f"from {head.node}")
            why, hint = advice(error.what, end.node)
            yield wrong(
                "link", head.node, what=error.what, why=f"; {why}", hint=f"on {head.node}: {hint}"
            )
    if reached:
        yield fine("link", head.node, others=", ".join(reached))
