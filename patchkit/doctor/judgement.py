"""Judge what the nodes of a cluster said, with all checks: the first cause first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.launch.survey import node_findings, pair_findings
from patchkit.cluster.net.checks import host_checks
from patchkit.cluster.net.plan import find_cages
from patchkit.doctor.machine import machine_findings
from patchkit.doctor.peers.check import peer_checks
from patchkit.doctor.peers.findings import peer_findings
from patchkit.doctor.peers.report import NodeReport
from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.runtime.host import advice
from patchkit.runtime.host.host import Host

# Checks of the network of one machine, or of two: what is said by one between nodes, which is more
# exact, is not said again. "" stands for one that is always made between nodes.
_SAID_BY = {
    **dict.fromkeys(("vllm", "torch", "triton", "ray", "nccl-of-vllm", "nccl-of-torch"), ""),
    "link": "cable",
    "half-down": "cable",
    "pcie-lanes": "lanes",
    "ipv4": "address",
    "no-address": "address",
    "networks": "address",
    "peers-end": "address",
    "mtu": "mtu",
    "twin-mtu": "mtu",
    "equal-mtu": "mtu",
    "addresses": "address-twice",
    "networks-of-its-own": "networks",
    "shared-network": "networks",
    "same-subnet": "networks",
}
_WRONG = (Level.ERROR, Level.WARNING)
_LATER = (Level.NOTE, Level.UNKNOWN, Level.OK)


def cluster_findings(file: ClusterFile, reports: Sequence[NodeReport]) -> list[Finding]:
    """Return all findings: what may be the cause of others comes first, what is well last."""
    found = list(peer_findings(file, reports))
    told = {
        (each.about, node)
        for each in found
        if each.level in _WRONG
        for node in _finding_nodes(each)
    }
    for each in _machine_findings(reports):
        said_by = _SAID_BY.get(each.about)
        if said_by is None or (
            said_by and not any((said_by, n) in told for n in _finding_nodes(each))
        ):
            found.append(each)
            told |= {(each.about, node) for node in _finding_nodes(each) if each.level in _WRONG}
    return sorted(found, key=_cause_order)


def _finding_nodes(finding: Finding) -> list[str]:
    return finding.where.split(", ")


def _machine_findings(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield what is wrong with each machine, with its network, and with both ends of a cable."""
    for each in reports:
        yield from machine_findings(each)
    known = [(each.node, each.facts) for each in reports if each.facts]
    for name, facts in known:
        yield from node_findings(name, facts)
        yield from _about_node(name, advice.remarks(facts.host))
        if len(reports) > 1:
            yield from _about_node(name, _cable_checks(facts.host))
    if known and reports[0].facts:
        names = [name for name, _facts in known]
        found = pair_findings(names, [facts for _name, facts in known])
        yield from (replace(each, about=_check_id(each.about)) for each in found)


def _cable_checks(host: Host) -> Iterator[Finding]:
    """Yield the checks of a host's cables; remarks about the machine are made elsewhere."""
    if chosen := find_cages(host, cabled=True):
        ids = {each.about for each in advice.remarks(host)}
        yield from (each for each in host_checks(host, chosen, None) if each.about not in ids)


def _about_node(node: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings about a part of a machine as findings about a node."""
    for each in findings:
        what = f"{each.where}: {each.what}" if each.where else each.what
        yield replace(each, where=node, about=_check_id(each.about), what=what, kind=HostError)


def _check_id(about: str) -> str:
    return about.lower().replace(" ", "-").replace("'", "")


def _cause_order(finding: Finding) -> tuple[int, float, str, str]:
    """Return where a finding stands: errors and warnings in the order of causes, then the rest."""
    order = list(peer_checks())
    # What a machine lacks by itself comes before what is between machines, but for silence.
    cause = order.index(finding.about) if finding.about in order else 0.5
    level = _LATER.index(finding.level) + 1 if finding.level in _LATER else 0
    return level, cause, finding.where, finding.about
