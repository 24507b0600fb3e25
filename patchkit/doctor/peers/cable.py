"""Judge the cable between nodes: its ends, other networks, and the ways in both directions. Pure.

A way is the route of packets from one node to an address of another node.
"""

from collections.abc import Sequence
from dataclasses import replace

from patchkit.cluster.agent.node_facts import Way
from patchkit.cluster.net.addressing import find_cages
from patchkit.cluster.net.checks import (
    compare_mtus,
    host_checks,
    netdevs_towards,
    way_checks,
)
from patchkit.cluster.ssh.ssh import explain_failure, make_fine, sent_error, unchecked
from patchkit.doctor.peers.node_report import (
    NodeReport,
    NotCheckedError,
    Outcome,
    Reports,
    check,
)
from patchkit.finding import Finding, Findings, Level
from patchkit.frozen import frozen
from patchkit.runtime.host.host import Netdev, overlaps

_OF_WAYS = ("route", "way", "mtu")
_INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@frozen
class CableEnd:
    """A node's interfaces to the other nodes.

    ``holder`` is the interface that has the node's address in the cluster. ``taken`` are findings:
    an address of another node that this node has as well.
    """

    report: NodeReport
    netdevs: tuple[Netdev, ...] = ()
    holder: Netdev | None = None
    taken: tuple[Finding, ...] = ()

    @property
    def node(self) -> str:
        return self.report.node

    @property
    def mtu(self) -> int:
        return self.holder.mtu if self.holder else 0

    @property
    def obstacle(self) -> str:
        """Return why nothing can be tried through the interfaces, "" if all can."""
        if self.report.facts is None:
            return self.report.why_not("facts")

        if self.taken:
            return f"{self.node}: {self.taken[0].what}"

        dark = ", ".join(netdev.name for netdev in self.netdevs if not netdev.linked)
        if dark:
            return f"{dark} of {self.node} has no carrier"

        if not self.holder:
            return f"{self.node} has no address in the cluster's network"

        if any(overlaps(self.report.host, [self.holder.name])):
            return f"{self.node} has two interfaces in one network"

        return ""


def cable_findings(nodes: Reports) -> Findings:
    """Yield the findings of each node's end of the cable, and of the ways between them."""
    ends = [_cable_end(node, nodes) for node in nodes]
    for end in ends:
        yield from _network_findings(end)
        yield from check_address(end, ends[0])
        yield from check_address_twice(end)

    # The ways between the head, the first end, and each worker, in both directions.
    head, *workers = ends
    for end in workers:
        if head.holder and end.holder and head.mtu != end.mtu:
            yield compare_mtus(head.holder, end.holder, (head.node, end.node))

    yield from check_ways(head, workers)
    for end in workers:
        yield from check_ways(end, [head])

    yield from check_links(head, workers)


def _network_findings(end: CableEnd) -> Findings:
    """Yield the checks of a node's network, as `net verify` makes them there."""
    for about, part in (("cable", end.netdevs), ("networks", end.holder)):
        if not part:
            yield unchecked(about, end.node, end.obstacle)

    if end.report.facts is None:
        return

    host = end.report.host
    cages = find_cages(host, cabled=True)
    names = tuple(netdev.name for netdev in end.netdevs)
    for finding in host_checks(host, cages, end.node, names):
        what = f"{finding.where}: {finding.what}"
        yield replace(finding, where=end.node, what=what)


def _cable_end(node: NodeReport, nodes: Reports) -> CableEnd:
    if node.facts is None:
        return CableEnd(report=node)

    host = node.facts.host
    holder = host.netdev_of(node.address)
    variables = node.env.variables if node.env else {}

    names = [holder.name] if holder else []
    for variable in _INTERFACE_VARIABLES:
        value = variables.get(variable, "")
        names += value.lstrip("=").split(",")

    unique_names = dict.fromkeys(names)
    netdevs = tuple(filter(None, map(host.netdev, unique_names)))
    taken = [
        node.find("address-twice", owner=owner, netdev=netdev.name, address=address)
        for owner in nodes
        for netdev in host.netdevs
        for address in netdev.ipv4
        if owner is not node and str(address.ip) == owner.address
    ]
    return CableEnd(report=node, netdevs=netdevs, holder=holder, taken=tuple(taken))


@check("address")
def check_address(end: CableEnd, head: CableEnd) -> Outcome:
    report = end.report
    error = report.no_address
    report.part("facts")

    if end.holder and not error:
        return {"address": report.address, "netdev": end.holder.name}

    have_carrier = all(netdev.carrier for netdev in end.netdevs)
    if end.holder or not have_carrier:
        raise NotCheckedError(end.obstacle)

    command = _former_address_command(end, head)
    error = error or NotCheckedError(f"no interface has {report.address}")
    return report.find(
        "address",
        what=error.what,
        why=error.why or "the others look for this node there",
        command=command or error.hint,
    )


def _former_address_command(end: CableEnd, head: CableEnd) -> str:
    """Return the command that gives a node its former address, with the head's prefix length.

    Return "" if the head lacks its address, or if the node's address or interface is not known.
    """
    if not (head.holder and end.report.address and end.netdevs):
        return ""

    position = head.holder.ips.index(head.report.address)
    prefix = head.holder.ipv4[position].network.prefixlen
    address = f"{end.report.address}/{prefix}"
    netdev = end.netdevs[0].name
    return end.report.command("sudo", "ip", "address", "add", address, "dev", netdev)


@check("address-twice")
def check_address_twice(end: CableEnd) -> Outcome:
    end.report.part("facts")
    return end.taken or {}


@check(*_OF_WAYS)
def check_ways(end: CableEnd, peers: Sequence[CableEnd]) -> Outcome:
    """Return the findings of the ways from a node to its peers."""
    if end.obstacle:
        raise NotCheckedError(end.obstacle)

    ways = [
        (peer, way)
        for name, way in end.report.part("ways")
        for peer in peers
        if peer.node == name
    ]
    if not ways:
        raise NotCheckedError("no address of another node is known")

    # Two addresses of a peer on one interface have the same findings.
    findings = (
        finding for peer, way in ways for finding in _way_findings(end, peer, way)
    )
    return list(dict.fromkeys(findings))


def _way_findings(end: CableEnd, peer: CableEnd, way: Way) -> Findings:
    """Yield the checks of one way, also those that were not made."""
    if peer.obstacle:
        yield from (unchecked(about, end.node, peer.obstacle) for about in _OF_WAYS)
        return

    if way.plain == "answers" and end.mtu != peer.mtu:
        way = replace(way, full="unknown", said=f"{peer.node} has another MTU")

    # If none or several are in the network of the address: the one with the node's address.
    netdevs = netdevs_towards(end.report.host.netdevs, way.address)
    if len(netdevs) != 1 and end.holder:
        netdevs = [end.holder.name]

    for result in way_checks(way, netdevs[0], peer.node, end.node):
        if result.level is Level.UNKNOWN:
            yield unchecked(result.about, end.node, result.what)
        else:
            yield replace(result, where=end.node)


@check("link")
def check_links(head: CableEnd, workers: Sequence[CableEnd]) -> Outcome:
    """Return a finding for each worker that the head does not reach by ssh, and OK for the rest."""
    findings = []
    reached = []
    links = head.report.part("links")
    for end, link in zip(workers, links, strict=False):
        obstacle = head.obstacle or end.obstacle
        if not link.error:
            reached.append(end.node)
        elif obstacle:
            findings.append(unchecked("link", head.node, obstacle))
        else:
            error = sent_error(link.error, f"from {head.node}")
            reason, hint = explain_failure(error.what, end.node)

            finding = head.report.find(
                "link",
                what=error.what,
                why=f"; {reason}",
                hint=f"on {head.node}: {hint}",
            )
            findings.append(finding)

    if reached:
        others = ", ".join(reached)
        findings.append(make_fine("link", head.node, others=others))

    return findings
