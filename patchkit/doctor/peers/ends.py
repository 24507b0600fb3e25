"""Judge each end of the cable: its carrier, its address, the networks beside it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from patchkit.cluster.ssh.ssh import there
from patchkit.doctor.peers.check import fine, unknown, wrong
from patchkit.doctor.peers.report import NodeReport
from patchkit.finding import Finding
from patchkit.runtime.host.host import Host, Netdev
from patchkit.runtime.host.networks import overlaps

_NAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class CableEnd:
    """A node's interface to the others; ``out`` is why nothing can be tried through it."""

    node: NodeReport
    netdevs: tuple[Netdev, ...]
    out: str

    @property
    def name(self) -> str:
        """Return the node's name."""
        return self.node.node

    @property
    def holder(self) -> Netdev | None:
        """Return the interface that has the node's address."""
        return _holder(self.node, self.node.address)

    @property
    def mtu(self) -> int:
        """Return the MTU of that interface, 0 if it is not known."""
        return self.holder.mtu if self.holder else 0


def cable_ends(nodes: Sequence[NodeReport]) -> list[CableEnd]:
    """Return the end of each node."""
    return [_end(each, nodes) for each in nodes]


def end_findings(ends: Sequence[CableEnd]) -> Iterator[Finding]:
    """Yield what each end is like, by itself and beside the others."""
    for end in ends:
        yield from _cable(end)
        yield from _address(end, ends)
        yield from _twice(end, ends)
        yield from _networks(end)


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


def _holder(node: NodeReport, address: str) -> Netdev | None:
    host: Host | None = node.facts.host if node.facts else None
    for netdev in host.netdevs if host and address else ():
        if any(str(each.ip) == address for each in netdev.ipv4):
            return netdev
    return None
