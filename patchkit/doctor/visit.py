"""Look at a cluster, or at this machine as one of a single node: facts, server and logs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from urllib.parse import urlsplit

from patchkit.cluster.agent import server_answers
from patchkit.cluster.agent.server_answers import ServerAnswers
from patchkit.cluster.agent.unit_state import JournalLine
from patchkit.cluster.launch.cluster import Cluster, read_group_journal
from patchkit.doctor.cluster import examine_nodes
from patchkit.doctor.gpu import try_gpus
from patchkit.doctor.judgement import LATER, cluster_findings
from patchkit.doctor.nccl import nccl_agreement, nccl_findings, read_nccl
from patchkit.doctor.peers.check import unchecked
from patchkit.doctor.peers.node_report import NodeReport, facts_for_causes, url_of
from patchkit.doctor.server import server_findings
from patchkit.doctor.symptoms.findings import log_findings, read_journals
from patchkit.errors import HostError, PatchkitError
from patchkit.finding import Finding, Level
from patchkit.runtime.rules.condition import Situation

_LINES = 5000  # of each node's journal: more than a start writes
_SAVED = 1000  # lines of all journals that a report has
_FOR_UP = ("systemd", "linger", "memlock", "rsync", "python", "ssh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What was found, the first cause first; what the nodes said of themselves, and wrote last."""

    findings: tuple[Finding, ...]
    reports: tuple[NodeReport, ...] = ()
    lines: tuple[tuple[str, str], ...] = ()

    def parts(self) -> dict[str, object]:
        """Return what a bug report holds, by file name; secrets and names are still in it."""
        parts: dict[str, object] = {"findings.json": [its.fields() for its in self.findings]}
        # Errors stand in the findings, and what was placed in the facts.
        for report in self.reports:
            plain = replace(report, silence=None, no_address=None, missing={}, placed=None)
            for name, said in asdict(plain).items():
                if said and not isinstance(said, str):
                    parts[f"{report.node}/{name}.json"] = said
        if self.lines:
            parts["journal.txt"] = "".join(f"{node}: {text}\n" for node, text in self.lines)
        return parts


def visit(cluster: Cluster, *, gpu: bool = False, port: int = 0, here: bool) -> Visit:
    """Return what is wrong with the nodes of a cluster, between them, and with what they serve.

    With ``gpu`` the nodes try their GPUs, which takes minutes. The server is asked at ``port`` of
    the head, 0 for where `up` lets it listen. ``here`` says that it is this machine, whether or not
    `up` was ever called.
    Raises nothing for a node that does not answer: that is what is wrong.
    """
    reports = examine_nodes(cluster)
    node, judged = reports[0], reports
    placed = None if port else node.placed
    url = url_of(placed, port or cluster.file.serve.port)
    said = node.silence or _ask_server(cluster, url)
    if len(reports) == 1 and node.listeners and isinstance(said, ServerAnswers) and said.version:
        # Who listens where a vLLM answers is the server, whoever started it.
        own = urlsplit(said.url).port
        others = tuple(listener for listener in node.listeners if listener.port != own)
        judged = [replace(node, listeners=others)]
    found = cluster_findings(cluster.file, judged)
    if here and not node.placed:
        found = [
            replace(its, level=Level.NOTE, why=f"`patchkit up` needs it: {its.why}")
            if its.about in _FOR_UP and its.level not in LATER
            else its
            for its in found
        ]
    if isinstance(said, PatchkitError):
        found.append(unchecked("server", node.node, said.what))
    else:
        units = node.state.units if node.state else ()
        for its in server_findings(node.node, said, units):
            # That nothing answers at the very port that a user named is an error.
            silent = bool(port) and its.about == "server-answers"
            found.append(replace(its, level=Level.ERROR, kind=HostError) if silent else its)
    found += try_gpus(reports) if gpu else ()
    lines: list[tuple[str, JournalLine]] = []
    found += _judge_logs(cluster, reports, lines)
    return Visit(
        findings=tuple(sorted(found, key=lambda finding: finding.level in LATER)),
        reports=tuple(reports),
        lines=tuple((name, line.text) for name, line in lines[-_SAVED:]),
    )


def local_facts(cluster: Cluster) -> Situation:
    """Return the facts of this machine that causes hang on; none unless vLLM is meant to run here.

    A log that is read on a workstation is more likely another machine's.
    """
    (report,) = examine_nodes(cluster)
    found = facts_for_causes(report)
    return found if found.get("target") in ("gb10", "thor") else {}


def _ask_server(cluster: Cluster, url: str) -> ServerAnswers | PatchkitError:
    """Return what the server answers; it is asked on the head, since it may listen there alone."""
    given = {"url": url, "metrics": server_answers.wanted_metrics()}
    try:
        said = cluster.head.call(ServerAnswers, server_answers.ask_server, **given)
    except PatchkitError as error:
        return error
    return replace(said, url=url)


def _judge_logs(
    cluster: Cluster, reports: Sequence[NodeReport], lines: list[tuple[str, JournalLine]]
) -> Iterator[Finding]:
    """Yield what is known of what the ranks wrote, and of NCCL; add it to ``lines``."""
    head = reports[0]
    started = [its for its in reports if its.silence is None and its.placed]
    for its in reports:
        if its not in started:
            why = "it did not answer" if its.silence else "nothing was started"
            yield unchecked("log", its.node, why)
    if not started:
        return
    # What they wrote since the server runs, or the newest lines if it does not.
    unit = head.state.unit(cluster.file.unit) if head.state else None
    since = unit.since if unit and unit.active == "active" else ""
    names = [its.node for its in started]
    journal = read_group_journal(cluster, since=since, lines=0 if since else _LINES, nodes=names)
    for name, error in journal.silent.items():
        yield unchecked("log", name, error.what)
    lines += journal.lines
    if not lines:
        return
    log, writers = read_journals(lines, facts_for_causes(head))
    found = list(log_findings(log, nodes=writers))
    yield from found
    for name in names:
        if all(finding.where != name for finding in found):
            what = f"{writers.count(name)} lines of the journal: nothing that is known"
            yield Finding(level=Level.OK, where=name, about="log", what=what)
    if len(reports) > 1:
        logs = {
            name: read_nccl(line.text for node, line in lines if node == name) for name in names
        }
        for its in started:
            yield from nccl_findings(its.node, logs[its.node], its.env.variables if its.env else {})
        yield from nccl_agreement(logs)
