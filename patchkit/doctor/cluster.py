"""Ask all nodes of a cluster side by side what each says of itself, and then of the others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from patchkit.cluster.agent import examination
from patchkit.cluster.agent.links import Way
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import ClusterFile
from patchkit.cluster.launch.units import HEAD_PORTS
from patchkit.cluster.models.names import ModelFolder
from patchkit.cluster.ssh.node import Remote, everywhere
from patchkit.cluster.ssh.ssh import sent_error
from patchkit.doctor.peers.node_report import ClockOffset, NodeReport, SaidParts, placed_files
from patchkit.errors import HostError, PatchkitError
from patchkit.runtime.host.hardware import target_of
from patchkit.runtime.node.address import named_address
from patchkit.runtime.node.topology import attach

_EXAMINED = (*("facts", "state", "health", "contents", "processes", "listeners", "disks"),)
_WRITTEN = ("/tmp", "/var/tmp")  # noqa: S108 - where compilers and ranks write


@dataclass(frozen=True, slots=True, kw_only=True)
class _SentReport(SaidParts):
    """What ``examine`` and ``meet`` send, as far as each of them says it."""

    errors: Mapping[str, Mapping[str, str]]
    began: float = 0.0
    ended: float = 0.0
    ways: tuple[Way, ...] | None = None

    def missing_parts(self, node: str) -> dict[str, PatchkitError]:
        """Return the errors of the parts that it lacks, as errors of the node."""
        return {part: sent_error(fields, node) for part, fields in self.errors.items()}


def examine_nodes(cluster: Cluster) -> list[NodeReport]:
    """Return what each node says of itself, and then of the others; all are asked side by side.

    Raises nothing for a node that does not answer: its report says why.
    """
    file = cluster.file
    needs = [port for needed in HEAD_PORTS.values() for port in needed]

    def ask(node: Remote) -> NodeReport:
        units = cluster.units if node == cluster.head else [file.unit]
        before = time.time()
        sent = node.call(
            _SentReport,
            examination.examine,
            name=file.name,
            venv=file.venv,
            units=units,
            ports=sorted({file.serve.port, *needs}),
            folders=["~", file.venv, file.model_folder, *_WRITTEN],
        )
        after = time.time()
        ahead = ((sent.began - before) + (sent.ended - after)) / 2
        on_the_way = (after - before) - (sent.ended - sent.began)
        return NodeReport(
            node=node.destination,
            clock=ClockOffset(ahead=ahead, error=max(on_the_way, 0) / 2),
            **{part: getattr(sent, part) for part in _EXAMINED},
            placed=placed_files(sent.facts.files, file.unit) if sent.facts else None,
            missing=sent.missing_parts(node.destination),
        )

    reports = [
        NodeReport(node=node.destination, silence=said) if isinstance(said, PatchkitError) else said
        for node, said in zip(cluster.nodes, everywhere(cluster.nodes, ask), strict=True)
    ]
    if len(reports) > 1:
        reports = _add_addresses(file, reports)
    return _meet_others(cluster, reports)


# The second call: what a node sees of the others


def _add_addresses(file: ClusterFile, reports: Sequence[NodeReport]) -> list[NodeReport]:
    """Return the reports with each node's address: its own now, or what is written down."""
    found: list[NodeReport] = []
    for node, report in zip(file.node, reports, strict=True):
        is_head = not found
        written = node.address
        if report.env and not written:
            written = "" if report.env.edited else report.env.variables.get("VLLM_HOST_IP", "")
            written = written or (report.env.facts.get("head", "") if is_head else "")
        try:
            written = named_address(written)
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
            attached = attach(
                host,
                role="head" if is_head else "worker",
                topology=serve.topology,
                nodes=len(file.node),
                head=head,
                target=serve.target or target_of(host),
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
    pins = (ModelFolder(repo=repo, commit=each).name for repo, each in cluster.file.models.items())
    pinned = [f"{cluster.file.model_folder}/{name}" for name in pins]
    models = [source] if (source := _started_model(head)) else pinned
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
            (other.node, address) for other in others for address in _cable_addresses(report, other)
        ]
        own_model = _started_model(report)
        sent = node.call(
            _SentReport,
            examination.meet,
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
        missing = {**report.missing, **sent.missing_parts(node.destination)}
        links = sent.links if report is head else None
        return replace(report, models=sent.models, links=links, ways=ways, missing=missing)

    answers = everywhere(list(zip(cluster.nodes, reports, strict=True)), ask)
    met = []
    for report, answer in zip(reports, answers, strict=True):
        if isinstance(answer, PatchkitError):
            parts = dict.fromkeys(("ways", "links", "models"), answer)
            answer = replace(report, missing={**report.missing, **parts})
        met.append(answer)
    return met


def _started_model(report: NodeReport) -> str:
    """Return the folder of the model that was started last, "" for none."""
    source = report.placed.word_after("serve") if report.placed else ""
    return source if source.startswith("/") else ""


def _cable_addresses(own: NodeReport, other: NodeReport) -> list[str]:
    """Return a node's addresses on the cable, both halves of it, as its peer sees them."""
    found = [other.address] if other.address else []
    if own.facts is None or other.facts is None:
        return found
    host = own.facts.host
    halves = [netdev for netdev in host.netdevs if netdev.cage is not None and netdev.carrier]
    networks = {address.network for netdev in halves for address in netdev.lasting}
    for netdev in other.facts.host.netdevs:
        found += [str(address.ip) for address in netdev.lasting if address.network in networks]
    mine = {str(address.ip) for netdev in host.netdevs for address in netdev.ipv4}
    return [address for address in dict.fromkeys(found) if address not in mine]
