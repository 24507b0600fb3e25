"""Ask the nodes of a cluster, or this machine as its only node, and judge their answers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from urllib.parse import urlsplit

from patchkit.cluster.agent import node_facts
from patchkit.cluster.agent.node_facts import Way
from patchkit.cluster.agent.node_state import NodeLine
from patchkit.cluster.launch.cluster import Cluster, read_group_journal
from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.launch.units import head_ports
from patchkit.cluster.models.model_files import ModelFolder
from patchkit.cluster.net.checks import find_targets
from patchkit.cluster.openai.server_answers import ServerAnswers, ask_server
from patchkit.cluster.ssh.node import Remote, require_all, run_on_all
from patchkit.cluster.ssh.ssh import sent_error, unchecked
from patchkit.doctor.archive import FieldMap
from patchkit.doctor.cluster_checks import NOT_WRONG, cluster_findings
from patchkit.doctor.gpu import try_gpus
from patchkit.doctor.nccl_lines import nccl_findings, read_nccl
from patchkit.doctor.peers.node_report import (
    NodeAnswer,
    NodeReport,
    Reports,
    facts_for_causes,
    placed_files,
)
from patchkit.doctor.server import describe_server, server_findings
from patchkit.doctor.symptoms.findings import log_findings, read_journals
from patchkit.errors import HostError, PatchkitError
from patchkit.finding import Finding, Findings, Level
from patchkit.frozen import Values, frozen
from patchkit.runtime.host.host import Software
from patchkit.runtime.node.topology import check_ipv4, choose_attachment
from patchkit.runtime.rules.rule import Situation
from patchkit.target import is_unified

_JOURNAL_LINES = 5000  # of each node's journal: more than a start writes
_SAVED_LINES = 1000  # lines of all journals that a report has
_NEEDED_BY_UP = (
    "systemd",
    "linger",
    "memlock",
    "rsync",
    "python",
    "ssh",
)
_WRITTEN = ("/tmp", "/var/tmp")  # noqa: S108 - where compilers and ranks write


@frozen
class Examination:
    """The result of doctor: findings, the first cause first, reports of nodes, and log lines.

    ``lines`` are the last lines of the journals: each is a pair of its node and its text. For a
    log that a user gave, the place in the log stands for the node.
    """

    findings: tuple[Finding, ...]
    reports: tuple[NodeReport, ...] = ()
    lines: tuple[tuple[str, str], ...]

    def report_content(self) -> FieldMap:
        """Return the content of a bug report by name; secrets and names are not replaced yet."""
        nodes = []
        for report in self.reports:
            # Errors are in the findings, and placed files in the facts.
            facts_only = replace(
                report,
                missing={},
                no_address=None,
                placed=None,
                silence=None,
            )
            nodes.append(asdict(facts_only, dict_factory=FieldMap))

        return FieldMap(
            findings=[FieldMap(finding.fields()) for finding in self.findings],
            nodes=nodes,
            journal="".join(f"{node}: {text}\n" for node, text in self.lines),
        )


def examine_cluster(
    cluster: Cluster,
    *,
    gpu: bool = False,
    port: int = 0,
    is_local: bool,
) -> Examination:
    """Return what is wrong with the nodes of a cluster, between them, and with their server.

    With ``gpu`` the nodes try their GPUs, which takes minutes. The server is asked at ``port`` of
    the head; 0 means the port at which `up` lets the server listen. ``is_local`` says that this
    machine is the only node: without a start by `up`, what only `up` needs is then a note.
    A node that does not answer is a finding, not an error.
    """
    reports = examine_nodes(cluster)
    head = reports[0]
    url = f"http://127.0.0.1:{port or cluster.serve.port}"
    if head.placed and head.placed.url and not port:
        url = head.placed.url  # where `up` let the server listen

    # The head asks the server, which may listen at an address of the head alone.
    answers = (
        head.silence
        or run_on_all(
            [cluster.head],
            lambda node: node.call(
                ServerAnswers,
                ask_server,
                url=url,
                cluster=cluster.name,
            ),
        )[0]
    )

    judged = list(reports)
    of_server: Iterable[Finding]
    if isinstance(answers, PatchkitError):
        of_server = [unchecked("server", head.node, answers.what)]
    else:
        answers = replace(answers, url=url)
        judged[0] = _add_server(head, answers, len(reports))
        of_server = _server_findings(head, answers, is_named=port > 0)

    findings = cluster_findings(cluster, judged)
    if is_local and not head.placed:
        findings = [_as_needed_by_up(finding) for finding in findings]

    findings += of_server
    if gpu:
        findings += try_gpus(reports)

    journal: list[NodeLine] = []
    findings += _judge_journals(cluster, reports, journal)

    findings.sort(key=lambda finding: finding.level in NOT_WRONG)
    saved = journal[-_SAVED_LINES:]
    return Examination(
        findings=tuple(findings),
        reports=tuple(reports),
        lines=tuple((node, line.text) for node, line in saved),
    )


def _add_server(
    head: NodeReport,
    answers: ServerAnswers,
    nodes: int,
) -> NodeReport:
    """Return the head's report with what answers at the server's port.

    If that is vLLM on a cluster of one node, its listener is removed from the report: the server
    is no stranger that takes a port. Else a description of what answers is added.
    """
    is_single_vllm = nodes == 1 and answers.version
    if not is_single_vllm or not head.listeners:
        return replace(head, serving=describe_server(answers))

    # The listener at vLLM's port is the server, whoever started it.
    port = urlsplit(answers.url).port
    listeners = [listener for listener in head.listeners if listener.port != port]
    return replace(head, listeners=tuple(listeners))


def _as_needed_by_up(finding: Finding) -> Finding:
    """Return a finding as a note if only `up` needs what is missing, else the finding as it is."""
    if finding.about not in _NEEDED_BY_UP or finding.level in NOT_WRONG:
        return finding

    why = f"`patchkit up` needs it: {finding.why}"
    return replace(finding, level=Level.NOTE, why=why)


def _server_findings(
    head: NodeReport,
    answers: ServerAnswers,
    *,
    is_named: bool,
) -> Findings:
    """Yield the findings of a server; silence at a port that a user named is an error."""
    units = head.state.units if head.state else ()
    for finding in server_findings(head.node, answers, units):
        if is_named and finding.about == "server-answers":
            finding = replace(finding, level=Level.ERROR, kind=HostError)
        yield finding


def local_facts(cluster: Cluster) -> Situation:
    """Return the facts of this machine that decide causes, {} unless CPU and GPU share memory.

    A log that is read on any other machine, such as a workstation, was probably written elsewhere.
    """
    facts = facts_for_causes(examine_nodes(cluster)[0])
    return facts if is_unified(facts.get("target")) else {}


def _judge_journals(
    cluster: Cluster,
    reports: Reports,
    lines: list[NodeLine],
) -> Findings:
    """Yield the findings about the journals of the ranks, and append the journals to ``lines``.

    A node that did not answer, or where nothing was started, is a finding.
    """
    started = []
    for report in reports:
        if report.silence:
            yield unchecked("log", report.node, "it did not answer")
        elif not report.placed:
            yield unchecked("log", report.node, "nothing was started")
        else:
            started.append(report)

    if not started:
        return

    # Read all lines since the server was started; if it does not run, the newest lines.
    head = reports[0]
    unit = head.state.unit(cluster.unit) if head.state else None
    since = unit.since if unit and unit.active == "active" else ""
    journal = read_group_journal(
        cluster,
        since=since,
        lines=0 if since else _JOURNAL_LINES,
        nodes=[report.node for report in started],
    )
    for name, error in journal.silent.items():
        yield unchecked("log", name, error.what)

    lines += journal.lines
    if lines:
        yield from _judge_lines(lines, started, facts_for_causes(head))

    if lines and len(reports) > 1:
        yield from _judge_nccl(started, lines)


def _judge_lines(
    lines: Sequence[NodeLine],
    reports: Reports,
    facts: Situation,
) -> Findings:
    log, writers = read_journals(lines, facts)

    quiet_nodes = dict.fromkeys(report.node for report in reports)
    for finding in log_findings(log, nodes=writers):
        quiet_nodes.pop(finding.where, None)
        yield finding

    for name in quiet_nodes:
        count = writers.count(name)
        yield Finding(
            level=Level.OK,
            where=name,
            about="log",
            what=f"{count} lines of the journal: nothing that is known",
        )


def _judge_nccl(
    reports: Reports,
    lines: Sequence[NodeLine],
) -> Findings:
    for report in reports:
        texts = (line.text for node, line in lines if node == report.node)
        variables = report.env.variables if report.env else {}
        yield from nccl_findings(report.node, read_nccl(texts), variables)


# The answers of the nodes about themselves, side by side, and then about the others


@frozen
class _SentAnswer(NodeAnswer):
    """The answer of ``examine`` or ``meet`` on a node: its parts, and errors of missing parts."""

    errors: Mapping[str, Values]
    ways: tuple[Way, ...] | None = None

    def missing(self, node: str) -> dict[str, PatchkitError]:
        """Return missing part → the error that ``node`` sent instead."""
        return {part: sent_error(error, node) for part, error in self.errors.items()}


def examine_nodes(cluster: Cluster) -> list[NodeReport]:
    """Return the reports of all nodes: of each one about itself, and about its ways to the others.

    All nodes are asked at the same time. The report of a node that does not answer says why.
    """
    examine = partial(_examine_node, cluster)
    reports = require_all(run_on_all(cluster.nodes, examine))
    if len(reports) > 1:
        reports = _add_addresses(cluster, reports)

    meet = partial(_meet, cluster, reports)
    return require_all(run_on_all(cluster.nodes, meet, reports))


def _examine_node(cluster: Cluster, node: Remote) -> NodeReport:
    ports = {cluster.serve.port, *head_ports(cluster.serve)}
    try:
        sent = node.call(
            _SentAnswer,
            node_facts.examine,
            name=cluster.name,
            venv=cluster.venv,
            units=cluster.units_of(node),
            ports=sorted(ports),
            folders=[
                "~",
                cluster.venv,
                cluster.model_folder,
                *_WRITTEN,
            ],
            image=cluster.serve.image_asked,
            variables=cluster.rank_variables,
        )
    except PatchkitError as error:
        return NodeReport(node=node.destination, silence=error)

    placed = None
    if sent.facts:
        placed = placed_files(sent.facts.files, cluster.unit)

    report = NodeReport(
        **{part.name: getattr(sent, part.name) for part in fields(NodeAnswer)},
        node=node.destination,
        placed=placed,
        missing=sent.missing(node.destination),
    )
    return _add_image(report)


def _add_image(report: NodeReport) -> NodeReport:
    """Return a report with the CUDA release of the image and the disk of the container engine.

    Without a container engine the report is returned as it is.
    """
    image = report.facts.image if report.facts else None
    if not report.facts or not image or not image.version:
        return report

    host = report.facts.host
    # The image's Python may not have answered; its folder of vLLM is not a folder of the node.
    own_software = host.software or Software(python="")
    software = replace(
        own_software,
        cuda=own_software.cuda or image.cuda,
        vllm_home="",
    )

    host = replace(host, software=software)
    facts = replace(report.facts, host=host)
    disks = report.disks or ()
    if image.storage.total not in {disk.total for disk in disks}:
        disks = (*disks, image.storage)

    return replace(report, facts=facts, disks=disks)


def _add_addresses(
    file: ClusterFile,
    reports: Reports,
) -> list[NodeReport]:
    """Return the reports with each node's address in the cluster.

    That is the address of cluster.toml or of the last start while the node still has it, else the
    one that a start would take now; without either the written one remains.
    """
    addressed: list[NodeReport] = []
    for node, report in zip(file.members, reports, strict=True):
        report = replace(report, address=_written_address(node.address, report))

        head_address = addressed[0].address if addressed else file.members[0].address
        report = _add_address(file, report, head_address, is_head=not addressed)
        addressed.append(report)

    return addressed


def _written_address(from_file: str, report: NodeReport) -> str:
    """Return the address of cluster.toml, else of the last start; "" for none or an invalid one."""
    written = from_file
    if report.env and not written and not report.env.edited:
        written = report.env.variables.get("VLLM_HOST_IP", "")

    try:
        return check_ipv4(written)
    except PatchkitError:
        return ""


def _add_address(
    file: ClusterFile,
    report: NodeReport,
    head_address: str,
    *,
    is_head: bool,
) -> NodeReport:
    """Return a report with the address that a start would take now.

    The written address is kept if the node has it. If no address can be chosen, ``no_address`` of
    the report says why.
    """
    if report.facts is None:
        return report

    host = report.facts.host
    try:
        if not head_address and not is_head:
            raise HostError("the head's address is not known")
        attachment = choose_attachment(
            host,
            role="head" if is_head else "worker",
            topology=file.serve.topology,
            nodes=len(file.members),
            head=head_address,
            target=file.serve.target or host.target,
        )
    except PatchkitError as error:
        return replace(report, no_address=error)

    # The other nodes know this node by the written address.
    if report.address and host.has_address(report.address):
        return report

    return replace(report, address=attachment.address)


def _model_folders(
    file: ClusterFile,
    head: NodeReport,
    report: NodeReport,
) -> list[str]:
    """Return the folder of the served model on a node, else the folders of all pinned models."""
    if head.placed and head.placed.folder:
        # The rank of each node may have been told another folder.
        placed = report.placed or head.placed
        return [placed.folder or head.placed.folder]

    return [
        f"{file.model_folder}/{ModelFolder(repo=repo, commit=commit).name}"
        for repo, commit in file.models.items()
    ]


def _meet(
    file: ClusterFile,
    reports: Reports,
    node: Remote,
    report: NodeReport,
) -> NodeReport:
    """Return a node's report with its ways to its peers and its models; a head's with ssh links.

    The peers of the head are all workers; the only peer of a worker is the head. The report of a
    node that did not answer is returned as it is.
    """
    if report.silence:
        return report

    head = reports[0]
    workers = reports[1:]
    is_head = report is head
    targets = []
    for peer in workers if is_head else [head]:
        addresses = _cable_addresses(report, peer)
        targets += [(peer.node, address) for address in addresses]

    # The name by which the head reaches each worker, and the worker's address.
    links = [
        [entry.from_head, worker.address]
        for entry, worker in zip(file.members[1:], workers, strict=True)
    ]

    try:
        sent = node.call(
            _SentAnswer,
            node_facts.meet,
            addresses=[address for _peer, address in targets],
            peers=links if is_head else [],
            models=_model_folders(file, head, report),
        )
    except PatchkitError as error:
        missing = dict.fromkeys(("ways", "links", "models"), error)
        return replace(report, missing={**report.missing, **missing})

    ways = None
    if sent.ways is not None and len(sent.ways) == len(targets):
        # Take the requested address, not the one in the answer.
        pairs = zip(targets, sent.ways, strict=True)
        ways = tuple((peer, replace(way, address=to)) for (peer, to), way in pairs)

    return replace(
        report,
        models=sent.models,
        links=sent.links if is_head else None,
        ways=ways,
        missing={**report.missing, **sent.missing(report.node)},
    )


def _cable_addresses(report: NodeReport, peer: NodeReport) -> list[str]:
    """Return the addresses of a peer that a node should reach over the cable.

    These are the peer's address in the cluster, and all its lasting addresses in networks that
    the node has on connected ports of the cable; never an address that the node has itself.
    """
    addresses = [peer.address] if peer.address else []
    if report.facts is None or peer.facts is None:
        return addresses

    host = report.facts.host
    halves = [half for half in host.netdevs if half.cage is not None and half.carrier]
    addresses += find_targets(host, halves, peer.facts.host)
    return [
        address for address in dict.fromkeys(addresses) if not host.has_address(address)
    ]
