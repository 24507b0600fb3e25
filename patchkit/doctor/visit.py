"""Ask the nodes of a cluster, or this machine as one of a single node, and judge what they say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any
from urllib.parse import urlsplit

from patchkit.cluster.agent import node_facts
from patchkit.cluster.agent.links import Way
from patchkit.cluster.agent.unit_journal import JournalLine
from patchkit.cluster.launch.cluster import Cluster, read_group_journal
from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.launch.units import head_ports
from patchkit.cluster.models.names import ModelFolder
from patchkit.cluster.openai import server_answers
from patchkit.cluster.openai.server_answers import ServerAnswers
from patchkit.cluster.ssh.node import Remote, run_on_all
from patchkit.cluster.ssh.ssh import sent_error
from patchkit.doctor.archive import FieldMap
from patchkit.doctor.gpu import try_gpus
from patchkit.doctor.judgement import LATER, cluster_findings
from patchkit.doctor.nccl_lines import nccl_findings, read_nccl
from patchkit.doctor.peers.node_report import (
    NodeReport,
    SaidParts,
    facts_for_causes,
    placed_files,
    unchecked,
)
from patchkit.doctor.private_names import PrivateNames, private_names
from patchkit.doctor.server import describe_server, server_findings
from patchkit.doctor.symptoms.findings import log_findings, read_journals
from patchkit.errors import HostError, PatchkitError
from patchkit.finding import Finding, Level
from patchkit.runtime.host.host import Software
from patchkit.runtime.node.address import check_ipv4
from patchkit.runtime.node.topology import choose_attachment
from patchkit.runtime.rules.rule import Situation

_LINES = 5000  # of each node's journal: more than a start writes
_SAVED = 1000  # lines of all journals that a report has
_FOR_UP = ("systemd", "linger", "memlock", "rsync", "python", "ssh")
_WRITTEN = ("/tmp", "/var/tmp")  # noqa: S108 - where compilers and ranks write


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What was found, the first cause first; what the nodes said of themselves, and wrote last."""

    findings: tuple[Finding, ...]
    reports: tuple[NodeReport, ...] = ()
    lines: tuple[tuple[str, str], ...] = ()

    def parts(self) -> FieldMap:
        """Return what a bug report holds, by name; secrets and names are still in it."""
        # Errors stand in the findings, and what was placed in the facts.
        lacking: dict[str, Any] = {"silence": None, "no_address": None, "placed": None}
        reports = [replace(report, missing={}, **lacking) for report in self.reports]
        return FieldMap(
            findings=[FieldMap(finding.fields()) for finding in self.findings],
            nodes=[asdict(report, dict_factory=FieldMap) for report in reports],
            journal="".join(f"{node}: {text}\n" for node, text in self.lines),
        )

    def private_names(self, model: str = "") -> PrivateNames:
        """Return what the nodes say of themselves, and what they serve, beside a ``model``."""
        nodes = ((report.node, report.facts) for report in self.reports)
        folders = {
            print_.folder for report in self.reports for print_ in report.models or ()
        }
        placed = [report.placed for report in self.reports if report.placed]
        served = {name for files in placed for name in (files.model, files.folder)}
        return private_names(nodes, sorted({model, *folders, *served}))


def visit(cluster: Cluster, *, gpu: bool = False, port: int = 0, here: bool) -> Visit:
    """Return what is wrong with the nodes of a cluster, between them, and with what they serve.

    With ``gpu`` the nodes try their GPUs, which takes minutes. The server is asked at ``port`` of
    the head, 0 for where `up` lets it listen. ``here`` says that it is this machine, whether or not
    `up` was ever called.
    Raises nothing for a node that does not answer: that is what is wrong.
    """
    reports = examine_nodes(cluster)
    node, judged = reports[0], reports
    url = f"http://127.0.0.1:{port or cluster.file.serve.port}"
    if node.placed and node.placed.url and not port:  # as `up` placed it
        url = node.placed.url
    said: ServerAnswers | PatchkitError | None = node.silence
    if said is None:  # asked on the head, since it may listen there alone
        asked: dict[str, Any] = {"url": url, "cluster": cluster.file.name}
        ask = server_answers.ask_server
        (said,) = run_on_all(
            [cluster.head], lambda head: head.call(ServerAnswers, ask, **asked)
        )
    if isinstance(said, ServerAnswers):
        judged = [
            _add_server(node, said, urlsplit(url).port, len(reports)),
            *reports[1:],
        ]
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
        for its in server_findings(node.node, replace(said, url=url), units):
            # That nothing answers at the very port that a user named is an error.
            silent = bool(port) and its.about == "server-answers"
            found.append(
                replace(its, level=Level.ERROR, kind=HostError) if silent else its
            )
    found += try_gpus(reports) if gpu else ()
    lines: list[tuple[str, JournalLine]] = []
    found += _judge_logs(cluster, reports, lines)
    return Visit(
        findings=tuple(sorted(found, key=lambda finding: finding.level in LATER)),
        reports=tuple(reports),
        lines=tuple((name, line.text) for name, line in lines[-_SAVED:]),
    )


def _add_server(
    head: NodeReport, said: ServerAnswers, port: int | None, nodes: int
) -> NodeReport:
    """Return the head's report with what answers at the server's port."""
    if nodes > 1 or not said.version or not head.listeners:
        return replace(head, serving=describe_server(said))
    # Who listens where a vLLM answers is the server, whoever started it.
    others = tuple(listener for listener in head.listeners if listener.port != port)
    return replace(head, listeners=others)


def local_facts(cluster: Cluster) -> Situation:
    """Return the facts of this machine that causes hang on; none unless vLLM is meant to run here.

    A log that is read on a workstation is more likely another machine's.
    """
    (report,) = examine_nodes(cluster)
    found = facts_for_causes(report)
    return found if found.get("target") in ("gb10", "thor") else {}


def _judge_logs(
    cluster: Cluster,
    reports: Sequence[NodeReport],
    lines: list[tuple[str, JournalLine]],
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
    journal = read_group_journal(
        cluster, since=since, lines=0 if since else _LINES, nodes=names
    )
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
        for its in started:
            ranks = read_nccl(line.text for node, line in lines if node == its.node)
            yield from nccl_findings(
                its.node, ranks, its.env.variables if its.env else {}
            )


# What the nodes say of themselves, side by side, and then of the others


@dataclass(frozen=True, slots=True, kw_only=True)
class _SentReport(SaidParts):
    """What ``examine`` and ``meet`` send, as far as each of them says it."""

    errors: Mapping[str, Mapping[str, str]]
    ways: tuple[Way, ...] | None = None


def examine_nodes(cluster: Cluster) -> list[NodeReport]:
    """Return what each node says of itself, and then of the others; all are asked side by side.

    Raises nothing for a node that does not answer: its report says why.
    """
    file = cluster.file
    needs = [port for needed in head_ports(file.serve).values() for port in needed]

    def ask(node: Remote) -> NodeReport:
        sent = node.call(
            _SentReport,
            node_facts.examine,
            name=file.name,
            venv=file.venv,
            units=cluster.units_of(node),
            ports=sorted({file.serve.port, *needs}),
            folders=["~", file.venv, file.model_folder, *_WRITTEN],
            image=file.serve.image_asked,
        )
        name = node.destination
        made = NodeReport(
            node=name,
            **{part.name: getattr(sent, part.name) for part in fields(SaidParts)},
            placed=placed_files(sent.facts.files, file.unit) if sent.facts else None,
            missing={
                part: sent_error(error, name) for part, error in sent.errors.items()
            },
        )
        return _add_image(made)

    reports = [
        NodeReport(node=node.destination, silence=said)
        if isinstance(said, PatchkitError)
        else said
        for node, said in zip(
            cluster.nodes, run_on_all(cluster.nodes, ask), strict=True
        )
    ]
    if len(reports) > 1:
        reports = _add_addresses(file, reports)
    return _meet_others(cluster, reports)


def _add_image(report: NodeReport) -> NodeReport:
    """Return a report with the image's variables of its CUDA, and the disk of its engine."""
    if not (report.facts and (image := report.facts.image) and image.version):
        return report
    # The image's Python may not answer, and its folders are none of the node's.
    known = report.facts.host.software or Software(python="")
    software = replace(known, cuda=known.cuda or image.cuda, vllm_home="")
    facts = replace(report.facts, host=replace(report.facts.host, software=software))
    disks = report.disks or ()
    if image.storage.total not in {disk.total for disk in disks}:
        disks = (*disks, image.storage)
    return replace(report, facts=facts, disks=disks)


def _add_addresses(
    file: ClusterFile, reports: Sequence[NodeReport]
) -> list[NodeReport]:
    """Return the reports with each node's address: its own now, or what is written down."""
    found: list[NodeReport] = []
    for node, report in zip(file.node, reports, strict=True):
        is_head = not found
        written = node.address
        if report.env and not written and not report.env.edited:
            written = report.env.variables.get("VLLM_HOST_IP", "")
        try:
            written = check_ipv4(written)
        except PatchkitError:
            written = ""
        head = file.head.address if is_head else found[0].address
        found.append(replace(report, address=written))
        if report.facts is None:
            continue
        host, serve = report.facts.host, file.serve
        try:
            if not (head or is_head):
                raise HostError("the head's address is not known")
            attached = choose_attachment(
                host,
                role="head" if is_head else "worker",
                topology=serve.topology,
                nodes=len(file.node),
                head=head,
                target=serve.target or host.target,
            )
        except PatchkitError as error:
            found[-1] = replace(found[-1], no_address=error)
            continue
        # What the last start took is what the others know.
        if not (written and host.has_address(written)):
            found[-1] = replace(report, address=attached.address)
    return found


def _meet_others(cluster: Cluster, reports: Sequence[NodeReport]) -> list[NodeReport]:
    head = reports[0]
    pins = (
        ModelFolder(repo=repo, commit=each).name
        for repo, each in cluster.file.models.items()
    )
    pinned = [f"{cluster.file.model_folder}/{name}" for name in pins]
    models = [head.placed.folder] if head.placed and head.placed.folder else pinned
    peers = [
        [node.from_head, report.address]
        for node, report in zip(cluster.file.node[1:], reports[1:], strict=True)
    ]

    def ask(pair: tuple[Remote, NodeReport]) -> NodeReport:
        node, report = pair
        if report.silence:
            return report
        others = reports[1:] if report is head else reports[:1]
        targets = [
            (other.node, address)
            for other in others
            for address in _cable_addresses(report, other)
        ]
        own_model = report.placed.folder if report.placed else ""
        sent = node.call(
            _SentReport,
            node_facts.meet,
            addresses=[address for _name, address in targets],
            peers=peers if report is head else [],
            # Each node has it where its own rank was told to look.
            models=[own_model or models[0], *models[1:]] if models else [],
        )
        ways = None
        if sent.ways is not None and len(sent.ways) == len(targets):
            # The address is the one that was asked for, whatever the answer says.
            ways = tuple(
                (name, replace(way, address=address))
                for (name, address), way in zip(targets, sent.ways, strict=True)
            )
        missing = {
            part: sent_error(error, report.node) for part, error in sent.errors.items()
        }
        links = sent.links if report is head else None
        missing = {**report.missing, **missing}
        return replace(
            report, models=sent.models, links=links, ways=ways, missing=missing
        )

    answers = run_on_all(list(zip(cluster.nodes, reports, strict=True)), ask)
    met = []
    for report, answer in zip(reports, answers, strict=True):
        if isinstance(answer, PatchkitError):
            parts = dict.fromkeys(("ways", "links", "models"), answer)
            answer = replace(report, missing={**report.missing, **parts})
        met.append(answer)
    return met


def _cable_addresses(own: NodeReport, other: NodeReport) -> list[str]:
    """Return a node's addresses on the cable, both halves of it, as its peer sees them."""
    found = [other.address] if other.address else []
    if own.facts is None or other.facts is None:
        return found
    host = own.facts.host
    halves = [
        netdev for netdev in host.netdevs if netdev.cage is not None and netdev.carrier
    ]
    networks = {address.network for netdev in halves for address in netdev.lasting}
    for netdev in other.facts.host.netdevs:
        found += [
            str(address.ip) for address in netdev.lasting if address.network in networks
        ]
    mine = {str(address.ip) for netdev in host.netdevs for address in netdev.ipv4}
    return [address for address in dict.fromkeys(found) if address not in mine]
