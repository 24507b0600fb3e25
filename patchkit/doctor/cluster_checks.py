"""Run all checks of the reports of a cluster's nodes: the first cause first. Pure.

Each check finds for each node that all is well, what is wrong, or why it was not checked. A fault
is a finding only in the check of its cause: if an interface has no carrier, the checks of ways
through this interface are "not checked".
"""

from collections.abc import Collection
from dataclasses import replace

from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.launch.survey import node_findings, pair_findings
from patchkit.doctor.machine import disk_trouble, machine_findings
from patchkit.doctor.peers.cable import cable_findings
from patchkit.doctor.peers.node_report import (
    NodeReport,
    Outcome,
    Reports,
    check,
    require,
)
from patchkit.doctor.peers.software import model_findings, software_findings
from patchkit.doctor.peers.unit_findings import unit_findings
from patchkit.finding import Finding, Findings, Level, finding_texts
from patchkit.quoting import quoted
from patchkit.runtime.host import advice

_WRONG = (Level.ERROR, Level.WARNING)
NOT_WRONG = (Level.NOTE, Level.UNKNOWN, Level.OK)
"""Levels whose findings are shown behind errors and warnings."""


def cluster_findings(
    file: ClusterFile,
    reports: Reports,
) -> list[Finding]:
    """Return all findings: errors and warnings by their causes, then notes, unknown, and OK."""
    findings: list[Finding] = []
    for node in reports:
        findings += check_ssh(node)
        findings += check_disks(node)

    findings += _machine_findings(reports)
    if len(reports) > 1:
        findings += cable_findings(reports)

    if not file.serve.image:
        findings += software_findings(file, reports)

    findings += model_findings(file, reports)
    findings += unit_findings(file, reports)

    # A cable, or the MTUs of two interfaces, may be judged twice: a cage's and the cluster's.
    findings = list(_uncovered(dict.fromkeys(findings)))
    # Checks of peers.toml rank in the order of that file. Others, which are about one machine,
    # rank behind its first one, silence, and before its faults between machines.
    causes = {
        about: float(number) for number, about in enumerate(finding_texts("peers.toml"))
    }
    findings.sort(
        key=lambda finding: (
            # Errors and warnings have the same rank.
            max([*Level].index(finding.level), 1),
            causes.get(finding.about, 0.5),
            finding.where,
            finding.about,
        )
    )
    return findings


def _machine_findings(reports: Reports) -> list[Finding]:
    """Return the findings of each machine, and those of pairs of machines."""
    findings: list[Finding] = []
    for node in reports:
        findings += machine_findings(node)

    facts_by_name = {node.node: node.facts for node in reports if node.facts}
    for name, facts in facts_by_name.items():
        findings += node_findings(name, facts)
        for remark in advice.find_remarks(facts.host):
            text = ": ".join(filter(None, (remark.where, remark.what)))
            findings.append(replace(remark, where=name, what=text))

    if reports[0].facts:
        findings += pair_findings(list(facts_by_name), list(facts_by_name.values()))

    return findings


def _uncovered(findings: Collection[Finding]) -> Findings:
    """Yield the findings, except those that a more exact finding replaces.

    A fault replaces a finding about the same node if its text in peers.toml ``covers`` that.
    """
    covers: dict[str, str] = {}  # check of a machine → the more exact check
    for text in finding_texts("peers.toml").values():
        covers.update(dict.fromkeys(text.covers, text.id))

    faults = {
        (finding.about, node)
        for finding in findings
        if finding.level in _WRONG
        for node in finding.where.split(", ")
    }

    for finding in findings:
        about = finding.about.lower().replace(" ", "-").replace("'", "")
        covering = covers.get(about, "")

        nodes = finding.where.split(", ")
        is_covered = not faults.isdisjoint((covering, node) for node in nodes)
        if covering == finding.about or not is_covered:
            yield replace(finding, about=about)


@check("ssh")
def check_ssh(node: NodeReport) -> Outcome:
    return node.find("ssh") if node.silence else {}


@check("disk")
def check_disks(node: NodeReport) -> Outcome:
    """Return a finding for each full disk, else the folder and space (GB) of the fullest one."""
    disks = require(node.disks or None, node.why_not("disks"))
    full = [
        node.find(
            "disk",
            folder=disk.folder,
            what=trouble,
            quoted=quoted(disk.folder),
        )
        for disk in disks
        if (trouble := disk_trouble(disk))
    ]

    least = min(disks, key=lambda disk: disk.free)
    return full or {"folder": least.folder, "free": least.free / 1e9}
