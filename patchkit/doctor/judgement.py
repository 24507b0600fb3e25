"""Judge what the nodes of a cluster said, with all checks: the first cause first. Pure.

Every check says of every node that it is well, what is wrong, or why it was not looked at. What is
wrong is said once, where it begins: an interface without a carrier has no way that could be tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.launch.plan import node_findings, pair_findings
from patchkit.cluster.net.addressing import find_cages
from patchkit.cluster.net.checks import host_checks
from patchkit.cluster.ssh.ssh import ssh_command
from patchkit.doctor.machine import disk_trouble, machine_findings
from patchkit.doctor.peers.cable import cable_findings
from patchkit.doctor.peers.node_report import (
    NodeReport,
    Outcome,
    check,
    make_fine,
    require,
)
from patchkit.doctor.peers.software import model_findings, software_findings
from patchkit.doctor.peers.unit_findings import unit_findings
from patchkit.errors import HostError
from patchkit.finding import Finding, Level, finding_texts
from patchkit.quoting import quoted
from patchkit.runtime.host import advice

_WRONG = (Level.ERROR, Level.WARNING)
LATER = (Level.NOTE, Level.UNKNOWN, Level.OK)
"""Levels of what is not wrong, in the order in which it is said."""


def cluster_findings(file: ClusterFile, reports: Sequence[NodeReport]) -> list[Finding]:
    """Return all findings: what may be the cause of others comes first, what is well last."""
    found = []
    for node in reports:
        if error := node.silence:
            found.append(
                node.find("ssh", what=error.what, why=error.why, hint=error.hint)
            )
        else:
            found.append(make_fine("ssh", node.node))
        found += check_disks(node)
    found += cable_findings(reports) if len(reports) > 1 else ()
    found += () if file.serve.image else software_findings(file, reports)
    found += model_findings(file, reports)
    found += unit_findings(file, reports)
    wrong = {
        (its.about, node)
        for its in found
        if its.level in _WRONG
        for node in its.where.split(", ")
    }
    # What is wrong with each machine, with its network, and with both ends of a cable.
    alone = [its for node in reports for its in machine_findings(node)]
    known = {node.node: node.facts for node in reports if node.facts}
    for name, facts in known.items():
        remarks = list(advice.find_remarks(facts.host))
        chosen = find_cages(facts.host, cabled=True) if len(reports) > 1 else None
        ids = {remark.about for remark in remarks}
        checks = host_checks(facts.host, chosen) if chosen else ()
        alone += node_findings(name, facts)
        for its in (*remarks, *(each for each in checks if each.about not in ids)):
            what = f"{its.where}: {its.what}" if its.where else its.what
            alone.append(replace(its, where=name, what=what, kind=HostError))
    alone += pair_findings([*known], [*known.values()]) if reports[0].facts else ()
    peers = finding_texts("peers.toml")
    said = {each: text.id for text in peers.values() for each in text.covers}
    said["pcie-lanes"] = "lanes"  # a remark
    for own in alone:
        finding = replace(
            own, about=own.about.lower().replace(" ", "-").replace("'", "")
        )
        said_by, nodes = said.get(finding.about), finding.where.split(", ")
        if said_by is None or not any((said_by, node) in wrong for node in nodes):
            found.append(finding)
            if finding.level in _WRONG:
                wrong |= {(finding.about, node) for node in nodes}
    # What a machine lacks by itself comes before what is between machines, but for silence.
    causes = {about: float(number) for number, about in enumerate(peers)}
    found.sort(key=lambda its: (causes.get(its.about, 0.5), its.where, its.about))
    levels = (*_WRONG, *LATER)
    return sorted(found, key=lambda its: max(levels.index(its.level), 1))


@check("disk")
def check_disks(node: NodeReport) -> Outcome:
    """Return the disks of a node on which nothing can be written any more."""
    disks = require(node.disks or None, node.why_not("disks"))
    full = []
    for disk in disks:
        if what := disk_trouble(disk):
            largest = " | ".join(
                (quoted("du", "-xah", "-d", "1", disk.folder), "sort -h", "tail")
            )
            fields = {
                "what": what,
                "command": ssh_command(node.node, "sh", "-c", largest),
            }
            full.append(node.find("disk", folder=disk.folder, **fields))
    least = min(disks, key=lambda disk: disk.free)
    return full or {"folder": least.folder, "free": least.free / 1e9}
