"""Judge the cable between nodes: carrier, addresses, routes, frames of the full MTU, ssh. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address

from patchkit.finding import Finding
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.host.networks import overlaps
from patchkit.runtime.net.facts import facts as network
from patchkit.runtime.on_node.ways import Way
from patchkit.runtime.peers.report import NodeReport
from patchkit.runtime.peers.texts import fine, unknown, wrong
from patchkit.runtime.remote.failure import sent_error
from patchkit.runtime.remote.ssh import there

_NAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class CableEnd:
    """A node's interface to the others; ``out`` is why nothing can be tried through it."""

    node: NodeReport
    netdevs: tuple[Netdev, ...]
    out: str

    @property
    def holder(self) -> Netdev | None:
        """Return the interface that has the node's address."""
        return _holder(self.node, self.node.address)


def network_findings(nodes: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield what each end of the cable is like, and then the ways between the ends."""
    ends = [_end(each, nodes) for each in nodes]
    for end in ends:
        yield from _cable(end)
        yield from _address(end, ends)
        yield from _twice(end, ends)
        yield from _networks(end)
    yield from _mtu_ends(ends)
    for end in ends:
        yield from _ways(end, ends)
    yield from _links(ends)


def _end(node: NodeReport, nodes: Sequence[NodeReport]) -> CableEnd:
    if node.facts is None:
        return CableEnd(node=node, netdevs=(), out=node.why_not("facts"))
    host, variables = node.facts.host, {}
    if node.placed and node.placed.env:
        variables = dict(node.placed.env.variables)
    named = [each for name in _NAMES for each in variables.get(name, "").lstrip("=").split(",")]
    holder = _holder(node, node.address)
    names = dict.fromkeys([*filter(None, named), *([holder.name] if holder else [])])
    netdevs = tuple(each for name in names if (each := host.netdev(name)))
    dark = [each.name for each in netdevs if not (each.up and each.carrier)]
    out = f"{', '.join(dark)} of {node.node} has no carrier" if dark else ""
    if not out and not holder:
        out = f"{node.node} has no address in the cluster's network"
    if taken := next(_taken(node, nodes), None):
        out = f"{node.node} has the address of {taken[0].node}"
    elif not out and holder and next(overlaps(host, [holder.name]), None):
        out = f"{node.node} has two interfaces in one network"
    return CableEnd(node=node, netdevs=netdevs, out=out)


def _cable(end: CableEnd) -> Iterator[Finding]:
    name = end.node.node
    dark = [each for each in end.netdevs if not (each.up and each.carrier)]
    for each in dark:
        seen = f"{each.state}, {'a' if each.carrier else 'no'} carrier"
        command = there(name, "ip", "-brief", "link", "show", each.name)
        yield wrong("cable", name, netdev=each.name, state=seen, command=command)
    if not end.netdevs:
        yield unknown("cable", name, end.out or "no interface of the cluster is known")
    elif not dark:
        yield fine("cable", name, netdevs=", ".join(each.name for each in end.netdevs))


def _address(end: CableEnd, ends: Sequence[CableEnd]) -> Iterator[Finding]:
    node, holder = end.node, end.holder
    if node.facts is None:
        yield unknown("address", node.node, end.out)
    elif holder and not node.no_address:
        yield fine("address", node.node, address=node.address, netdev=holder.name)
    elif holder or any(not each.carrier for each in end.netdevs):
        yield unknown("address", node.node, end.out)
    else:
        error = node.no_address
        what = error.what if error else f"no interface has {node.address}"
        yield wrong(
            "address",
            node.node,
            what=what,
            why=error.why if error and error.why else "the others look for this node there",
            command=_giving(end, ends) or (error.hint if error else ""),
        )


def _giving(end: CableEnd, ends: Sequence[CableEnd]) -> str:
    """Return the command that gives a node its former address back, "" where that is not known."""
    first = ends[0].holder
    own = [each for each in (first.ipv4 if first else ()) if str(each.ip) == ends[0].node.address]
    if not (own and end.node.address and end.netdevs):
        return ""
    address = f"{end.node.address}/{own[0].network.prefixlen}"
    words = ("ip", "address", "add", address, "dev", end.netdevs[0].name)
    return there(end.node.node, "sudo", *words)


def _twice(end: CableEnd, ends: Sequence[CableEnd]) -> Iterator[Finding]:
    """Yield which addresses of others this node has as well."""
    node = end.node
    if node.facts is None:
        yield unknown("address-twice", node.node, end.out)
        return
    taken = list(_taken(node, [each.node for each in ends]))
    for other, netdev, own in taken:
        words = ("sudo", "ip", "address", "del", own, "dev", netdev)
        yield wrong(
            "address-twice",
            node.node,
            address=other.address,
            netdev=netdev,
            other=other.node,
            command=there(node.node, *words),
        )
    if not taken:
        yield fine("address-twice", node.node)


def _taken(node: NodeReport, nodes: Sequence[NodeReport]) -> Iterator[tuple[NodeReport, str, str]]:
    """Yield whose address a node has as well, at which interface, with its prefix."""
    host = node.facts.host if node.facts else None
    for netdev in host.netdevs if host else ():
        for own in netdev.ipv4:
            for other in nodes:
                if other is not node and str(own.ip) == other.address:
                    yield other, netdev.name, str(own)


def _networks(end: CableEnd) -> Iterator[Finding]:
    node, holder = end.node, end.holder
    if holder is None or node.facts is None:
        yield unknown("networks", node.node, end.out or "it has no address")
        return
    clashes = list(overlaps(node.facts.host, [holder.name]))
    for each in clashes:
        words = ("ip", "address", "del", str(each.present), "dev", each.other.name)
        yield wrong(
            "networks",
            node.node,
            netdev=holder.name,
            address=each.address,
            other=each.other.name,
            present=each.present,
            command=there(node.node, "sudo", *words),
        )
    if not clashes:
        yield fine("networks", node.node, netdev=holder.name)


# The ways between two ends


def _mtu_ends(ends: Sequence[CableEnd]) -> Iterator[Finding]:
    """Yield where the MTU of a worker's interface and of the head's differ."""
    first = ends[0].holder
    for end in ends[1:]:
        other = end.holder
        if first is None or other is None or first.mtu == other.mtu:
            continue
        # Of two that differ the one is at fault that is not as `net plan` makes it.
        odd, right = (ends[0], end) if other.mtu == network()["plan"]["mtu"] else (end, ends[0])
        if {first.mtu, other.mtu}.isdisjoint({network()["plan"]["mtu"]}):
            odd, right = sorted((ends[0], end), key=_mtu)
        netdev, wanted = odd.holder, _mtu(right)
        assert netdev is not None
        words = ("sudo", "ip", "link", "set", netdev.name, "mtu", str(wanted))
        yield wrong(
            "mtu",
            odd.node.node,
            what=f"{netdev.name} has an MTU of {netdev.mtu}, and {right.node.node} one of {wanted}",
            mtu=wanted,
            command=there(odd.node.node, *words),
        )


def _mtu(end: CableEnd) -> int:
    return end.holder.mtu if end.holder else 0


def _ways(end: CableEnd, ends: Sequence[CableEnd]) -> Iterator[Finding]:
    """Yield how the ways from a node are: routes, echoes, frames of its own MTU."""
    node, known = end.node, {each.node.node: each for each in ends}
    peers = list(ends[1:] if end is ends[0] else ends[:1])
    reason = end.out or (None if node.ways is not None else node.why_not("ways"))
    reachable = [each for each in peers if not each.out]
    if reason is None and not reachable:
        reason = "; ".join(each.out for each in peers)
    tried = [] if reason else [(known[name], way) for name, way in node.ways or ()]
    if reason or not tried:
        for about in ("route", "way", "mtu"):
            yield unknown(about, node.node, reason or "no address of another node is known")
        return
    problems: dict[str, list[Finding]] = {"route": [], "way": [], "mtu": []}
    unsure: dict[str, str] = {}
    for peer, way in tried:
        if peer.out:
            unsure |= dict.fromkeys(problems, peer.out)
        else:
            _judge(end, peer, way, problems, unsure)
    names = ", ".join(peer.node.node for peer, _way in tried)
    for about, found in problems.items():
        yield from found
        if about in unsure:
            yield unknown(about, node.node, unsure[about])
        elif not found and not (about == "mtu" and _differs(end, peers)):
            netdevs = ", ".join(dict.fromkeys(way.netdev for _peer, way in tried))
            yield fine(about, node.node, others=names, netdevs=netdevs, mtu=_mtu(end))


def _differs(end: CableEnd, peers: Sequence[CableEnd]) -> bool:
    return any(_mtu(each) not in (0, _mtu(end)) for each in peers)


def _judge(
    end: CableEnd,
    peer: CableEnd,
    way: Way,
    problems: dict[str, list[Finding]],
    unsure: dict[str, str],
) -> None:
    """Add what is wrong with one way, or why that is not known."""
    name, other = end.node.node, peer.node.node
    netdev = _in_network(end.node, way.address) or end.holder
    ping = ("ping", "-c", "3", "-I", way.netdev, way.address)
    if not way.netdev:
        unsure |= dict.fromkeys(problems, way.said)
    elif netdev and (way.netdev != netdev.name or way.gateway):
        command = there(name, "ip", "route", "get", way.address)
        seen = way.netdev + (f", by way of {way.gateway}" if way.gateway else "")
        fields = {"other": other, "address": way.address, "seen": seen, "netdev": netdev.name}
        problems["route"].append(wrong("route", name, command=command, **fields))
        unsure |= dict.fromkeys(("way", "mtu"), f"packets for {other} take another way")
    elif way.plain == "unknown":
        unsure |= dict.fromkeys(("way", "mtu"), way.said)
    elif way.plain == "silent":
        fields = {"other": other, "address": way.address, "netdev": way.netdev}
        problems["way"].append(wrong("way", name, command=there(name, *ping), **fields))
        unsure["mtu"] = f"{other} does not answer"
    elif way.full == "unknown":
        unsure["mtu"] = way.said
    elif way.full == "silent" and not _differs(end, [peer]):
        what = f"frames of {way.mtu} bytes do not arrive at {other} ({way.address})"
        command = there(name, *ping[:3], "-M", "do", "-s", str(way.mtu - 28), *ping[3:])
        found = wrong("mtu", f"{name}, {other}", what=what, mtu=way.mtu, command=command)
        problems["mtu"].append(found)


def _in_network(node: NodeReport, address: str) -> Netdev | None:
    """Return the one interface that is in an address's network."""
    ip, host = IPv4Address(address), node.facts.host if node.facts else None
    netdevs = host.netdevs if host else ()
    near = [each for each in netdevs if any(ip in own.network for own in each.ipv4)]
    return near[0] if len(near) == 1 else None


def _links(ends: Sequence[CableEnd]) -> Iterator[Finding]:
    head, workers = ends[0], ends[1:]
    name = head.node.node
    if head.node.links is None:
        yield unknown("link", name, head.node.why_not("links"))
        return
    reached = []
    for end, link in zip(workers, head.node.links, strict=False):
        if not link.error:
            reached.append(end.node.node)
        elif end.out or head.out:
            yield unknown("link", name, head.out or end.out)
        else:
            error = sent_error(link.error, f"from {name}")
            yield wrong(
                "link",
                name,
                what=error.what,
                why=f"; {error.why}" if error.why else "",
                hint=f"on {name}: {error.hint}",
            )
    if reached:
        yield fine("link", name, others=", ".join(reached))


def _holder(node: NodeReport, address: str) -> Netdev | None:
    host: Host | None = node.facts.host if node.facts else None
    for netdev in host.netdevs if host and address else ():
        if any(str(each.ip) == address for each in netdev.ipv4):
            return netdev
    return None
