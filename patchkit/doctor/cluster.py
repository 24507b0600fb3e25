"""Ask all nodes of a cluster side by side, and judge what they say: the first cause first."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from patchkit.cluster.agent import examination
from patchkit.cluster.agent.examination import ModelPrint, PythonContents, UnitFile
from patchkit.cluster.agent.links import PeerLink, Way
from patchkit.cluster.agent.node_facts import DiskRoom, NodeFacts
from patchkit.cluster.agent.unit_state import GroupProcess, Listener, NodeState
from patchkit.cluster.health.node_health import NodeHealth
from patchkit.cluster.launch import ports
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.models.names import ModelFolder
from patchkit.cluster.ssh.failure import sent_error
from patchkit.cluster.ssh.node import Remote, everywhere
from patchkit.doctor.peers.placed_files import placed_files
from patchkit.doctor.peers.report import ClockOffset, NodeReport
from patchkit.errors import HostError, PatchkitError
from patchkit.runtime.host.hardware import target_of
from patchkit.runtime.node.address import named_address
from patchkit.runtime.node.topology import attach

_EXAMINED = (
    *("facts", "state", "unit_file", "health", "contents", "processes", "listeners", "disks"),
)
_WRITTEN = ("/tmp", "/var/tmp")  # noqa: S108 - where compilers and ranks write


@dataclass(frozen=True, slots=True, kw_only=True)
class _SentReport:
    """What ``examine`` and ``meet`` send, as far as each of them says it."""

    errors: Mapping[str, Mapping[str, str]]
    began: float = 0.0
    ended: float = 0.0
    facts: NodeFacts | None = None
    health: NodeHealth | None = None
    contents: PythonContents | None = None
    state: NodeState | None = None
    unit_file: UnitFile | None = None
    processes: tuple[GroupProcess, ...] | None = None
    listeners: tuple[Listener, ...] | None = None
    disks: tuple[DiskRoom, ...] | None = None
    ways: tuple[Way, ...] | None = None
    links: tuple[PeerLink, ...] | None = None
    models: tuple[ModelPrint, ...] | None = None


def examined(cluster: Cluster) -> list[NodeReport]:
    """Return what each node says of itself, and then of the others; all are asked side by side.

    Raises nothing for a node that does not answer: its report says why.
    """
    wanted = [cluster.file.serve.port]
    wanted += [each.port for kind in ("mp", "ray") for each in ports.needs(kind) if each.port]

    def ask(node: Remote) -> NodeReport:
        units = cluster.units if node == cluster.head else [cluster.file.unit]
        before = time.time()
        sent = node.call(
            _SentReport,
            examination.examine,
            name=cluster.file.name,
            venv=cluster.file.venv,
            units=units,
            ports=sorted(set(wanted)),
            folders=["~", cluster.file.venv, cluster.file.model_folder, *_WRITTEN],
        )
        after = time.time()
        return _first_report(cluster.file, node.destination, sent, before, after)

    reports = _add_addresses(cluster.file, _ask_each(cluster.nodes, ask))
    with ThreadPoolExecutor(1) as pool:
        tried = pool.submit(_try_ports, cluster, reports)
        head, *workers = _meet_others(cluster, reports)
        return [replace(head, **tried.result()), *workers]


def _ask_each(nodes: Sequence[Remote], ask: Callable[[Remote], NodeReport]) -> list[NodeReport]:
    found = everywhere(nodes, ask)
    return [
        NodeReport(node=node.destination, silence=each) if isinstance(each, PatchkitError) else each
        for node, each in zip(nodes, found, strict=True)
    ]


def _missing_parts(node: str, sent: _SentReport) -> dict[str, PatchkitError]:
    return {part: sent_error(fields, node) for part, fields in sent.errors.items()}


def _first_report(
    file: ClusterFile, node: str, sent: _SentReport, before: float, after: float
) -> NodeReport:
    """Return the report of the first call; ``before`` and ``after`` are this machine's clock."""
    there, here = sent.ended - sent.began, after - before
    ahead = ((sent.began - before) + (sent.ended - after)) / 2
    return NodeReport(
        node=node,
        clock=ClockOffset(ahead=ahead, error=max(here - there, 0) / 2),
        **{part: getattr(sent, part) for part in _EXAMINED},
        placed=placed_files(sent.facts.files, file.unit) if sent.facts else None,
        missing=_missing_parts(node, sent),
    )


# The second call: what a node sees of the others


def _add_addresses(file: ClusterFile, reports: Sequence[NodeReport]) -> list[NodeReport]:
    """Return the reports with each node's address: its own now, or what is written down."""
    if len(reports) < 2:
        return list(reports)
    written = [
        _parse_ipv4(node.address) or _parse_ipv4(_written_address(report))
        for node, report in zip(file.node, reports, strict=True)
    ]
    found = [_with_address(file, reports[0], written[0], "head", file.head.address)]
    head = found[0].address
    for report, known in zip(reports[1:], written[1:], strict=True):
        found.append(_with_address(file, report, known, "worker", head))
    return found


def _parse_ipv4(text: str) -> str:
    """Return a text if it is an IPv4 address, else ""."""
    try:
        return named_address(text)
    except PatchkitError:
        return ""


def _written_address(report: NodeReport) -> str:
    env = report.placed.env if report.placed else None
    own = env.variables.get("VLLM_HOST_IP", "") if env and not env.edited else ""
    head = env.facts.get("head", "") if env and env.role == "head" else ""
    return own or head


def _with_address(
    file: ClusterFile, report: NodeReport, written: str, role: str, head: str
) -> NodeReport:
    if report.facts is None:
        return replace(report, address=written)
    host, serve = report.facts.host, file.serve
    try:
        if role == "worker" and not head:
            raise HostError("the head's address is not known")
        attached = attach(
            host,
            role=role,
            topology=serve.topology,
            nodes=len(file.node),
            head=head,
            target=serve.target or target_of(host),
        )
    except PatchkitError as error:
        return replace(report, address=written, no_address=error)
    # What the last start took is what the others know.
    kept = bool(written) and host.has_address(written)
    return replace(report, address=written if kept else attached.address)


def _meet_others(cluster: Cluster, reports: Sequence[NodeReport]) -> list[NodeReport]:
    head = reports[0]
    models = _model_folders(cluster.file, head)
    peers = [
        [node.from_head, report.address]
        for node, report in zip(cluster.file.node[1:], reports[1:], strict=True)
    ]

    def ask(pair: tuple[Remote, NodeReport]) -> NodeReport:
        node, report = pair
        others = reports[1:] if report is head else reports[:1]
        targets = [
            (each.node, address) for each in others for address in _cable_addresses(report, each)
        ]
        sent = node.call(
            _SentReport,
            examination.meet,
            addresses=[address for _name, address in targets],
            peers=peers if report is head else [],
            # Each node has it where its own rank was told to look.
            models=[_started_model(report) or models[0], *models[1:]] if models else [],
        )
        ways = sent.ways if sent.ways is None or len(sent.ways) == len(targets) else None
        return replace(
            report,
            models=sent.models,
            links=sent.links if report is head else None,
            # The address is the one that was asked for, whatever the answer says.
            ways=None
            if ways is None
            else tuple(
                (name, replace(way, address=address))
                for (name, address), way in zip(targets, ways, strict=True)
            ),
            missing={**report.missing, **_missing_parts(node.destination, sent)},
        )

    answered = [
        pair for pair in zip(cluster.nodes, reports, strict=True) if pair[1].silence is None
    ]
    found = everywhere(answered, ask)
    by_name = {pair[1].node: each for pair, each in zip(answered, found, strict=True)}
    met = []
    for report in reports:
        each = by_name.get(report.node, report)
        if isinstance(each, PatchkitError):
            parts = dict.fromkeys(("ways", "links", "models"), each)
            each = replace(report, missing={**report.missing, **parts})
        met.append(each)
    return met


def _model_folders(file: ClusterFile, head: NodeReport) -> list[str]:
    """Return the folder of the model that was started last, else those that are pinned."""
    if source := _started_model(head):
        return [source]
    pins = (ModelFolder(repo=repo, commit=commit).name for repo, commit in file.models.items())
    return [f"{file.model_folder}/{name}" for name in pins]


def _started_model(report: NodeReport) -> str:
    source = report.placed.source if report.placed else ""
    return source if source.startswith("/") else ""


def _cable_addresses(own: NodeReport, other: NodeReport) -> list[str]:
    """Return a node's addresses on the cable, both halves of it, as its peer sees them."""
    found = [other.address] if other.address else []
    if own.facts is None or other.facts is None:
        return found
    host = own.facts.host
    halves = [each for each in host.netdevs if each.cage is not None and each.carrier]
    networks = {address.network for each in halves for address in each.lasting}
    for netdev in other.facts.host.netdevs:
        found += [str(each.ip) for each in netdev.lasting if each.network in networks]
    mine = {str(each.ip) for netdev in host.netdevs for each in netdev.ipv4}
    return [each for each in dict.fromkeys(found) if each not in mine]


def _try_ports(cluster: Cluster, reports: Sequence[NodeReport]) -> dict[str, Any]:
    """Return what a head's report says of the ports between nodes; not while a rank has them."""
    units = [each.state.unit(cluster.file.unit) if each.state else None for each in reports]
    off = all(each is not None and each.active in ("inactive", "failed") for each in units)
    known = all(each.address and each.no_address is None for each in reports)
    if len(reports) < 2 or not off or not known:
        return {}
    env = reports[0].placed.env if reports[0].placed else None
    executor = env.facts.get("executor", "mp") if env else "mp"
    try:
        ports.check_ports(cluster, [each.address for each in reports], executor)
    except PatchkitError as error:
        return {"ports_tried": True, "blocked": error}
    return {"ports_tried": True}
