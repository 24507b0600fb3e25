"""Look at a cluster, or at this machine as one of a single node: facts, server and logs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from patchkit.errors import PatchkitError
from patchkit.finding import Finding, Level
from patchkit.runtime.doctor.cluster import cluster_findings, examined
from patchkit.runtime.doctor.log import log_findings
from patchkit.runtime.launch.cluster import Cluster
from patchkit.runtime.launch.journal import read_journals
from patchkit.runtime.launch.start import journals
from patchkit.runtime.peers.report import NodeReport

_LINES = 5000  # of each node's journal: more than a start writes
_FOR_UP = ("systemd", "linger", "memlock", "rsync", "python", "ssh")
_LATER = (Level.NOTE, Level.UNKNOWN, Level.OK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What was found, the first cause first, and what the nodes said of themselves."""

    findings: tuple[Finding, ...]
    reports: tuple[NodeReport, ...]


def visit(cluster: Cluster) -> Visit:
    """Return what is wrong with the nodes of a cluster, and between them.

    Raises nothing for a node that does not answer: that is what is wrong.
    """
    reports = examined(cluster)
    found = cluster_findings(cluster.file, reports)
    if len(reports) == 1 and not reports[0].placed:
        found = [_only_for_up(each) for each in found]
    found += _logs(cluster, reports)
    in_order = sorted(found, key=lambda each: each.level in _LATER)
    return Visit(findings=tuple(in_order), reports=tuple(reports))


def _only_for_up(finding: Finding) -> Finding:
    """Return as a note what only `patchkit up` needs, of a machine where it was never called."""
    if finding.about not in _FOR_UP or finding.level in _LATER:
        return finding
    return replace(finding, level=Level.NOTE, why=f"`patchkit up` needs it: {finding.why}")


def _logs(cluster: Cluster, reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield what the ranks wrote: since the server runs, or the newest lines if it does not."""
    answered = [each for each in reports if each.silence is None and each.placed]
    for each in reports:
        if each not in answered:
            why = "no model was started here" if each.silence is None else "it did not answer"
            yield _unread(each.node, why)
    state = reports[0].state
    unit = state.unit(cluster.file.unit) if state else None
    runs = unit is not None and unit.active == "active"
    nodes = [each.node for each in answered]
    if not nodes:
        return
    try:
        lines = journals(
            cluster,
            since=unit.since if unit and runs else "",
            lines=0 if runs else _LINES,
            nodes=nodes,
        )
        log, writers = read_journals(lines, {"nodes": str(len(reports))})
    except PatchkitError as error:
        yield from (_unread(each, error.what) for each in nodes)
        return
    found = list(log_findings(log, nodes=writers))
    yield from found
    wrong = {each.where for each in found}
    for node in nodes:
        if node not in wrong:
            what = f"{writers.count(node)} lines of the journal: nothing that is known to be wrong"
            yield Finding(level=Level.OK, where=node, about="log", what=what)


def _unread(node: str, why: str) -> Finding:
    return Finding(level=Level.UNKNOWN, where=node, about="log", what=f"not checked: {why}")
