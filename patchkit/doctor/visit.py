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
from patchkit.doctor.cluster import examined
from patchkit.doctor.gpu import try_gpus
from patchkit.doctor.judgement import cluster_findings
from patchkit.doctor.log import log_findings
from patchkit.doctor.nccl import nccl_agreement, nccl_findings, read_nccl
from patchkit.doctor.peers.placed_files import url_of
from patchkit.doctor.peers.report import NodeReport
from patchkit.doctor.peers.situation import facts_for_causes
from patchkit.doctor.questions import question_findings, questions_to_ask
from patchkit.doctor.server import server_findings
from patchkit.doctor.symptoms.diagnosis import ReadLog
from patchkit.doctor.symptoms.journals import read_journals
from patchkit.errors import HostError, PatchkitError
from patchkit.finding import Finding, Level
from patchkit.runtime.rules.condition import Situation

_LINES = 5000  # of each node's journal: more than a start writes
_SAVED = 1000  # lines of all journals that a report has
_FOR_UP = ("systemd", "linger", "memlock", "rsync", "python", "ssh")
_LATER = (Level.NOTE, Level.UNKNOWN, Level.OK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What was found, the first cause first; what the nodes said of themselves, and wrote last."""

    findings: tuple[Finding, ...]
    reports: tuple[NodeReport, ...] = ()
    lines: tuple[tuple[str, str], ...] = ()

    def parts(self) -> dict[str, object]:
        """Return what a bug report holds, by file name; secrets and names are still in it."""
        parts: dict[str, object] = {"findings.json": [each.fields() for each in self.findings]}
        for report in self.reports:
            # Errors stand in the findings, and what was placed in the facts.
            plain = replace(
                report, silence=None, no_address=None, blocked=None, missing={}, placed=None
            )
            for name, said in asdict(plain).items():
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
    reports = examined(cluster)
    node, listens = reports[0], url_of(reports[0].placed, cluster.file.serve.port)
    said = node.silence or _ask_server(cluster.head, url or listens, key_file=SECRETS)
    judged = [_without_server(node, said)] if len(reports) == 1 else reports
    found = cluster_findings(cluster.file, judged)
    if here and not node.placed:
        found = [_only_for_up(each) for each in found]
    served = _judge_server(cluster.head, node, said, questions=questions)
    found += map(_insist, served) if url else served
    found += try_gpus(reports) if gpu else ()
    lines, unread = _read_journals(cluster, reports)
    found += unread
    if lines:
        found += _judge_logs(cluster, reports, lines)
    return Visit(
        findings=tuple(sorted(found, key=lambda each: each.level in _LATER)),
        reports=tuple(reports),
        lines=tuple((node, line.text) for node, line in lines[-_SAVED:]),
    )


def visit_server(url: str, *, questions: bool = False) -> Visit:
    """Return what is wrong with a server on a machine of which nothing else is known."""
    head, place = Remote(HERE), urlsplit(url).hostname or url
    # The key of this machine's own server goes to no other.
    said = _ask_server(head, url, key_file="")
    found = _judge_server(head, NodeReport(node=HERE), said, questions=questions)
    return Visit(findings=tuple(replace(_insist(each), where=place) for each in found))


def _insist(finding: Finding) -> Finding:
    """Return as an error that no server answers at the very place that a user named."""
    silent = finding.about == "server-answers"
    return replace(finding, level=Level.ERROR, kind=HostError) if silent else finding


def _ask_server(head: Remote, url: str, *, key_file: str) -> ServerAnswers | PatchkitError:
    """Return what the server answers; it is asked on the head, since it may listen there alone."""
    try:
        wanted = {"url": url, "key_file": key_file, "metrics": server_answers.wanted_metrics()}
        return replace(head.call(ServerAnswers, server_answers.ask_server, **wanted), url=url)
    except PatchkitError as error:
        return error


def _without_server(node: NodeReport, said: ServerAnswers | PatchkitError) -> NodeReport:
    """Leave out who listens where a vLLM answers: that is the server, whoever started it."""
    if isinstance(said, PatchkitError) or not said.version or node.listeners is None:
        return node
    port = urlsplit(said.url).port
    return replace(node, listeners=tuple(each for each in node.listeners if each.port != port))


def _judge_server(
    head: Remote, node: NodeReport, said: ServerAnswers | PatchkitError, *, questions: bool
) -> Iterator[Finding]:
    """Yield what is to be said of what the server answered."""
    if isinstance(said, PatchkitError):
        yield _unchecked("server", node.node, said.what)
        return
    yield from server_findings(node.node, said, node.state.units if node.state else ())
    if not questions or not said.asked or not said.token or said.token.first_ms is None:
        why = "no server gave a token" if questions else "--ask asks ten questions"
        yield _unchecked("sense", node.node, why)
        return
    try:
        # With the key of before, from where it was found.
        given = {"url": said.url, "model": said.asked, "key_file": said.key}
        asked = {**given, "questions": questions_to_ask()}
        answers = head.stream(AskedFact, server_answers.ask_facts, **asked)
        yield from question_findings(node.node, said.asked, list(answers))
    except PatchkitError as error:
        yield _unchecked("sense", node.node, error.what)


def _only_for_up(finding: Finding) -> Finding:
    """Return as a note what only `patchkit up` needs, of a machine where it was never called."""
    if finding.about not in _FOR_UP or finding.level in _LATER:
        return finding
    return replace(finding, level=Level.NOTE, why=f"`patchkit up` needs it: {finding.why}")


def _read_journals(
    cluster: Cluster, reports: Sequence[NodeReport]
) -> tuple[list[tuple[str, JournalLine]], list[Finding]]:
    """Return what the ranks wrote, and for each node that was not asked why.

    It is what they wrote since the server runs, or the newest lines if it does not.
    """
    asked = [each.node for each in reports if each.silence is None and each.placed]
    unread = [
        _unchecked(
            "log", each.node, "it did not answer" if each.silence else "no model was started here"
        )
        for each in reports
        if each.node not in asked
    ]
    state = reports[0].state
    unit = state.unit(cluster.file.unit) if state else None
    since = unit.since if unit and unit.active == "active" else ""
    if not asked:
        return [], unread
    found = read_group_journal(cluster, since=since, lines=0 if since else _LINES, nodes=asked)
    lines = list(found.lines)
    return lines, unread + [_unchecked("log", *each) for each in found.silent.items()]


def _judge_logs(
    cluster: Cluster, reports: Sequence[NodeReport], lines: Sequence[tuple[str, JournalLine]]
) -> Iterator[Finding]:
    """Yield what is known of what the ranks wrote."""
    known = {**facts_for_causes(reports[0]), "nodes": str(len(cluster.nodes))}
    log, writers = read_journals(lines, known)
    answered = [each for each in reports if each.silence is None and each.placed]
    yield from _judge_symptoms(log, writers, answered)
    if len(reports) > 1:
        yield from _judge_networks(lines, answered)


def _judge_symptoms(
    log: ReadLog, writers: Sequence[str], nodes: Sequence[NodeReport]
) -> Iterator[Finding]:
    found = list(log_findings(log, nodes=writers))
    yield from found
    wrong = {each.where for each in found}
    for node in nodes:
        if node.node not in wrong:
            what = f"{writers.count(node.node)} lines of the journal: nothing that is known"
            yield Finding(level=Level.OK, where=node.node, about="log", what=what)


def _judge_networks(
    lines: Sequence[tuple[str, JournalLine]], nodes: Sequence[NodeReport]
) -> Iterator[Finding]:
    """Yield which network NCCL took on each node, against what the node's env file means."""
    logs = {
        each.node: read_nccl(line.text for node, line in lines if node == each.node)
        for each in nodes
    }
    for each in nodes:
        env = each.placed.env if each.placed else None
        yield from nccl_findings(each.node, logs[each.node], env.variables if env else {})
    yield from nccl_agreement(logs)


def _unchecked(about: str, node: str, why: str | PatchkitError) -> Finding:
    if isinstance(why, PatchkitError):
        why = why.what
    return Finding(level=Level.UNKNOWN, where=node, about=about, what=f"not checked: {why}")


def local_facts(cluster: Cluster) -> Situation:
    """Return the facts of this machine that causes hang on; none unless vLLM is meant to run here.

    A log that is read on a workstation is more likely another machine's.
    """
    (report,) = examined(cluster)
    found = facts_for_causes(report)
    return found if found.get("target") in ("gb10", "thor") else {}
