"""Look at a cluster, or at this machine as one of a single node: facts, server and logs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from urllib.parse import urlsplit

from patchkit.cluster.agent import server_answers
from patchkit.cluster.agent.journal import JournalLine
from patchkit.cluster.agent.server_answers import AskedFact, ServerAnswers
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.journals import read_group_journal
from patchkit.cluster.openai.api_key import SECRETS
from patchkit.cluster.ssh.node import Remote
from patchkit.cluster.ssh.ssh import HERE
from patchkit.doctor.cluster import examine_nodes
from patchkit.doctor.gpu import try_gpus
from patchkit.doctor.judgement import LATER, cluster_findings
from patchkit.doctor.nccl import nccl_agreement, nccl_findings, read_nccl
from patchkit.doctor.peers.check import unchecked
from patchkit.doctor.peers.node_report import NodeReport, facts_for_causes
from patchkit.doctor.peers.placed_files import url_of
from patchkit.doctor.questions import question_findings, questions_to_ask
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
            plain = replace(report, silence=None, no_address=None, blocked=None, missing={})
            for name, said in asdict(replace(plain, placed=None)).items():
                if said and not isinstance(said, str):
                    parts[f"{report.node}/{name}.json"] = said
        if self.lines:
            parts["journal.txt"] = "".join(f"{node}: {text}\n" for node, text in self.lines)
        return parts


def visit(
    cluster: Cluster, *, questions: bool = False, gpu: bool = False, url: str = "", here: bool
) -> Visit:
    """Return what is wrong with the nodes of a cluster, between them, and with what they serve.

    With ``questions`` the model is asked some whose answers are known, a minute at most; with
    ``gpu`` the nodes try their GPUs, which takes minutes. ``url``, of this machine, is asked
    instead of where `up` lets the server listen. ``here`` says that it is this machine, whether or
    not `up` was ever called.
    Raises nothing for a node that does not answer: that is what is wrong.
    """
    reports = examine_nodes(cluster)
    node, judged = reports[0], reports
    listens = url or url_of(node.placed, cluster.file.serve.port)
    said = node.silence or _ask_server(cluster.head, listens, key_file=SECRETS)
    if len(reports) == 1 and node.listeners and isinstance(said, ServerAnswers) and said.version:
        # Who listens where a vLLM answers is the server, whoever started it.
        port = urlsplit(said.url).port
        others = tuple(listener for listener in node.listeners if listener.port != port)
        judged = [replace(node, listeners=others)]
    found = cluster_findings(cluster.file, judged)
    if here and not node.placed:
        found = [
            replace(its, level=Level.NOTE, why=f"`patchkit up` needs it: {its.why}")
            if its.about in _FOR_UP and its.level not in LATER
            else its
            for its in found
        ]
    served = _judge_server(cluster.head, node, said, questions=questions)
    found += map(_insist, served) if url else served
    found += try_gpus(reports) if gpu else ()
    answered = [its for its in reports if its.silence is None and its.placed]
    found += (
        unchecked("log", its.node, "it did not answer" if its.silence else "nothing was started")
        for its in reports
        if its not in answered
    )
    lines: list[tuple[str, JournalLine]] = []
    if answered:
        # What they wrote since the server runs, or the newest lines if it does not.
        unit = node.state.unit(cluster.file.unit) if node.state else None
        since = unit.since if unit and unit.active == "active" else ""
        names = [its.node for its in answered]
        journal = read_group_journal(
            cluster, since=since, lines=0 if since else _LINES, nodes=names
        )
        lines = list(journal.lines)
        found += (unchecked("log", name, error.what) for name, error in journal.silent.items())
    if lines:
        found += _judge_logs(reports, answered, lines)
    return Visit(
        findings=tuple(sorted(found, key=lambda finding: finding.level in LATER)),
        reports=tuple(reports),
        lines=tuple((name, line.text) for name, line in lines[-_SAVED:]),
    )


def visit_server(url: str, *, questions: bool = False) -> Visit:
    """Return what is wrong with a server on a machine of which nothing else is known."""
    head, place = Remote(HERE), urlsplit(url).hostname or url
    # The key of this machine's own server goes to no other.
    said = _ask_server(head, url, key_file="")
    found = _judge_server(head, NodeReport(node=HERE), said, questions=questions)
    return Visit(findings=tuple(replace(_insist(finding), where=place) for finding in found))


def local_facts(cluster: Cluster) -> Situation:
    """Return the facts of this machine that causes hang on; none unless vLLM is meant to run here.

    A log that is read on a workstation is more likely another machine's.
    """
    (report,) = examine_nodes(cluster)
    found = facts_for_causes(report)
    return found if found.get("target") in ("gb10", "thor") else {}


def _insist(finding: Finding) -> Finding:
    """Return as an error that no server answers at the very place that a user named."""
    silent = finding.about == "server-answers"
    return replace(finding, level=Level.ERROR, kind=HostError) if silent else finding


def _ask_server(head: Remote, url: str, *, key_file: str) -> ServerAnswers | PatchkitError:
    """Return what the server answers; it is asked on the head, since it may listen there alone."""
    given = {"url": url, "key_file": key_file, "metrics": server_answers.wanted_metrics()}
    try:
        return replace(head.call(ServerAnswers, server_answers.ask_server, **given), url=url)
    except PatchkitError as error:
        return error


def _judge_server(
    head: Remote, node: NodeReport, said: ServerAnswers | PatchkitError, *, questions: bool
) -> Iterator[Finding]:
    """Yield what is to be said of what the server answered."""
    if isinstance(said, PatchkitError):
        yield unchecked("server", node.node, said.what)
        return
    yield from server_findings(node.node, said, node.state.units if node.state else ())
    if not questions or not said.asked or not said.token or said.token.first_ms is None:
        why = "no server gave a token" if questions else "--ask asks ten questions"
        yield unchecked("sense", node.node, why)
        return
    # With the key of before, from where it was found.
    given = {"url": said.url, "model": said.asked, "key_file": said.key}
    try:
        asked = {**given, "questions": questions_to_ask()}
        answers = list(head.stream(AskedFact, server_answers.ask_facts, **asked))
    except PatchkitError as error:
        yield unchecked("sense", node.node, error.what)
    else:
        yield from question_findings(node.node, said.asked, answers)


def _judge_logs(
    reports: Sequence[NodeReport],
    answered: Sequence[NodeReport],
    lines: Sequence[tuple[str, JournalLine]],
) -> Iterator[Finding]:
    """Yield what is known of what the ranks wrote, and which network NCCL took on each node."""
    log, writers = read_journals(
        lines, {**facts_for_causes(reports[0]), "nodes": str(len(reports))}
    )
    found = list(log_findings(log, nodes=writers))
    yield from found
    for node in answered:
        if all(finding.where != node.node for finding in found):
            what = f"{writers.count(node.node)} lines of the journal: nothing that is known"
            yield Finding(level=Level.OK, where=node.node, about="log", what=what)
    if len(reports) > 1:
        logs = {
            node.node: read_nccl(line.text for name, line in lines if name == node.node)
            for node in answered
        }
        for node in answered:
            env = node.env
            yield from nccl_findings(node.node, logs[node.node], env.variables if env else {})
        yield from nccl_agreement(logs)
