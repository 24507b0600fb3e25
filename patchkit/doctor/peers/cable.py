"""Judge the cable between nodes: its ends, the networks beside it, the ways both ways. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address

from patchkit.cluster.agent.links import HEADERS, Way
from patchkit.cluster.ssh.ssh import explain_failure, sent_error, ssh_command
from patchkit.doctor.peers.node_report import (
    NodeReport,
    NotCheckedError,
    Outcome,
    check,
    make_finding,
    make_fine,
    require,
    unchecked,
)
from patchkit.finding import Finding
from patchkit.runtime.host.host import Netdev
from patchkit.runtime.host.networks import overlaps
from patchkit.runtime.rules.releases import read_env_data

_OF_WAYS = ("route", "way", "mtu")
_NAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class CableEnd:
    """A node's interfaces to the others; ``holder`` is the one that has the node's address.

    ``out`` is why nothing can be tried through it, ``taken`` are the nodes whose address it has as
    well, each with the interface and the address with its prefix.
    """

    report: NodeReport
    node: str
    netdevs: tuple[Netdev, ...] = ()
    holder: Netdev | None = None
    mtu: int = 0  # of the holder
    out: str
    taken: tuple[tuple[NodeReport, str, str], ...] = ()


def cable_findings(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield what each node's end of the cable is like, and how the ways between them are."""
    ends = [_cable_end(node, nodes) for node in nodes]
    for end in ends:
        yield from check_cable(end)
        yield from check_address(end, ends[0])
        yield from check_address_twice(end)
        yield from check_networks(end)
    # Of the ways between the head, the first end, and each worker: both directions.
    head, *workers = ends
    for end in workers:
        if head.mtu and end.mtu and head.mtu != end.mtu:
            # At fault is the one that is not as `net plan` makes it.
            smaller, larger = sorted((head, end), key=lambda each: each.mtu)
            planned = smaller.mtu == read_env_data("network")["plan"]["mtu"]
            odd, right = (larger, smaller) if planned else (smaller, larger)
            netdev = odd.holder.name if odd.holder else ""
            words = ("sudo", "ip", "link", "set", netdev, "mtu", str(right.mtu))
            what = (
                f"{netdev} has an MTU of {odd.mtu}, and {right.node} one of {right.mtu}"
            )
            yield odd.report.find(
                "mtu", what=what, command=ssh_command(odd.node, *words)
            )
    yield from check_ways(head, workers)
    for end in workers:
        yield from check_ways(end, [head])
    yield from check_links(head, workers)


def _cable_end(node: NodeReport, nodes: Sequence[NodeReport]) -> CableEnd:
    if node.facts is None:
        return CableEnd(report=node, node=node.node, out=node.why_not("facts"))
    host, variables = node.facts.host, node.env.variables if node.env else {}
    own = [(netdev, address) for netdev in host.netdevs for address in netdev.ipv4]
    holder = next(
        (netdev for netdev, address in own if str(address.ip) == node.address), None
    )
    names = [
        name for key in _NAMES for name in variables.get(key, "").lstrip("=").split(",")
    ]
    names = [*filter(None, names), *([holder.name] if holder else [])]
    netdevs = tuple(
        found for name in dict.fromkeys(names) if (found := host.netdev(name))
    )
    taken = tuple(
        (other, netdev.name, str(address))
        for netdev, address in own
        for other in nodes
        if other is not node and str(address.ip) == other.address
    )
    out = ""
    if taken:
        out = f"{node.node} has the address of {taken[0][0].node}"
    elif dark := [each.name for each in netdevs if not (each.up and each.carrier)]:
        out = f"{', '.join(dark)} of {node.node} has no carrier"
    elif not holder:
        out = f"{node.node} has no address in the cluster's network"
    elif next(overlaps(host, [holder.name]), None):
        out = f"{node.node} has two interfaces in one network"
    place = partial(
        CableEnd, report=node, node=node.node, netdevs=netdevs, holder=holder
    )
    return place(mtu=holder.mtu if holder else 0, out=out, taken=taken)


@check("cable")
def check_cable(end: CableEnd) -> Outcome:
    if not end.netdevs:
        raise NotCheckedError(end.out or "no interface of the cluster is known")
    dark = []
    for netdev in end.netdevs:
        if not (netdev.up and netdev.carrier):
            state = f"{netdev.state}, {'a' if netdev.carrier else 'no'} carrier"
            dark.append(end.report.find("cable", netdev=netdev.name, state=state))
    return dark or {"netdevs": ", ".join(each.name for each in end.netdevs)}


@check("address")
def check_address(end: CableEnd, first: CableEnd) -> Outcome:
    report, error = end.report, end.report.no_address
    if report.facts and end.holder and not error:
        return {"address": report.address, "netdev": end.holder.name}
    if (
        report.facts is None
        or end.holder
        or any(not each.carrier for each in end.netdevs)
    ):
        raise NotCheckedError(end.out)
    command = error.hint if error else ""
    # The command that gives a node its former address back, in the first node's network.
    for own in first.holder.ipv4 if first.holder else ():
        if str(own.ip) == first.report.address and report.address and end.netdevs:
            address = f"{report.address}/{own.network.prefixlen}"
            words = ("ip", "address", "add", address, "dev", end.netdevs[0].name)
            command = ssh_command(end.node, "sudo", *words)
    what = error.what if error else f"no interface has {report.address}"
    why = error.why if error and error.why else "the others look for this node there"
    return report.find("address", what=what, why=why, command=command)


@check("address-twice")
def check_address_twice(end: CableEnd) -> Outcome:
    """Return which addresses of others this node has as well."""
    end.report.part("facts")
    found = []
    for its, netdev, own in end.taken:
        fields = {
            "address": its.address,
            "netdev": netdev,
            "other": its.node,
            "own": own,
        }
        found.append(end.report.find("address-twice", **fields))
    return found or {}


@check("networks")
def check_networks(end: CableEnd) -> Outcome:
    holder = require(end.holder, end.out or "it has no address")
    found = []
    for clash in overlaps(end.report.host, [holder.name]):
        fields = {
            "netdev": holder.name,
            "address": clash.address,
            "present": clash.present,
        }
        found.append(end.report.find("networks", other=clash.other.name, **fields))
    return found or {"netdev": holder.name}


@check(*_OF_WAYS)
def check_ways(end: CableEnd, peers: Sequence[CableEnd]) -> Outcome:
    """Return how the ways from a node are."""
    if end.out:
        raise NotCheckedError(end.out)
    known = {peer.node: peer for peer in peers}
    tried = [
        (known[name], way) for name, way in end.report.part("ways") if name in known
    ]
    if not tried:
        raise NotCheckedError("no address of another node is known")
    judged = [_judge_way(end, peer, way) for peer, way in tried]
    fields = {
        "others": ", ".join(dict.fromkeys(peer.node for peer, _way in tried)),
        "netdevs": ", ".join(dict.fromkeys(way.netdev for _peer, way in tried)),
    }
    findings: list[Finding] = []
    for about in _OF_WAYS:
        found = dict.fromkeys(each[about] for each in judged if about in each)
        findings += found or [make_fine(about, end.node, mtu=end.mtu, **fields)]
    return findings


def _judge_way(end: CableEnd, peer: CableEnd, way: Way) -> Mapping[str, Finding]:
    """Return by check what is wrong with one way, or why that is not known."""

    def unsure(reason: str, *checks: str) -> dict[str, Finding]:
        return {about: unchecked(about, end.node, reason) for about in checks}

    if peer.out or not way.netdev:
        return unsure(peer.out or way.said, *_OF_WAYS)
    fields = {"other": peer.node, "address": way.address}
    ip = IPv4Address(way.address)
    # The one interface that is in the address's network, else that of the node's own.
    near = [
        each
        for each in end.report.host.netdevs
        if any(ip in own.network for own in each.ipv4)
    ]
    netdev = near[0] if len(near) == 1 else end.holder
    if netdev and (way.netdev != netdev.name or way.gateway):
        seen = way.netdev + (f", by way of {way.gateway}" if way.gateway else "")
        found = end.report.find("route", seen=seen, netdev=netdev.name, **fields)
        return {
            "route": found,
            **unsure(f"packets for {peer.node} go elsewhere", "way", "mtu"),
        }
    ping = ("ping", "-c", "3", "-I", way.netdev)
    if way.plain == "silent":
        command = ssh_command(end.node, *ping, way.address)
        found = end.report.find("way", netdev=way.netdev, command=command, **fields)
        return {"way": found, **unsure(f"{peer.node} does not answer", "mtu")}
    if way.plain == "unknown":
        return unsure(way.said, "way", "mtu")
    if end.mtu != peer.mtu:
        return unsure(f"{peer.node} has another MTU", "mtu")
    if way.full == "silent":
        what = f"frames of {way.mtu} bytes do not arrive at {peer.node} ({way.address})"
        large = ("-M", "do", "-s", str(way.mtu - HEADERS))
        command = ssh_command(end.node, *ping, *large, way.address)
        return {
            "mtu": make_finding(
                "mtu", f"{end.node}, {peer.node}", what=what, command=command
            )
        }
    return unsure(way.said, "mtu") if way.full == "unknown" else {}


@check("link")
def check_links(head: CableEnd, workers: Sequence[CableEnd]) -> Outcome:
    """Return which workers the head reaches by ssh."""
    findings, reached = [], []
    for end, link in zip(workers, head.report.part("links"), strict=False):
        if not link.error:
            reached.append(end.node)
        elif head.out or end.out:
            findings.append(unchecked("link", head.node, head.out or end.out))
        else:
            error = sent_error(link.error, f"from {head.node}")
            why, hint = explain_failure(error.what, end.node)
            fields = {
                "what": error.what,
                "why": f"; {why}",
                "hint": f"on {head.node}: {hint}",
            }
            findings.append(head.report.find("link", **fields))
    if reached:
        findings.append(make_fine("link", head.node, others=", ".join(reached)))
    return findings
