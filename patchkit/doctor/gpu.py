"""Have nodes try their GPUs, one by one and together; say what ran, was right, and was not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from patchkit.cluster.ssh.node import everywhere
from patchkit.cluster.ssh.ssh import there
from patchkit.doctor.log import diagnosis_finding
from patchkit.doctor.nccl import nccl_agreement, nccl_findings, read_nccl
from patchkit.doctor.peers.check import unknown
from patchkit.doctor.peers.report import NodeReport
from patchkit.doctor.smoke.smoke import (
    GpuNode,
    SmokeStep,
    all_reduce,
    all_reduce_test,
    smoke,
    smoke_steps,
)
from patchkit.doctor.smoke.steps import RANK, GpuStep
from patchkit.doctor.symptoms.diagnosis import read_log
from patchkit.errors import PatchkitError
from patchkit.finding import Finding, Level, finding_from_text
from patchkit.runtime.host.hardware import network_facts
from patchkit.units import BYTES_PER_MIB

_FILE = "gpu.toml"
_SOURCE = "as nccl-tests counts: bytes x 2 (n-1) / n over the median time of ten"


class _Figures(dict[str, object]):
    """Figures of a step; one that it did not say is shown as such."""

    def __missing__(self, key: str) -> object:
        return "?"


def gpu_findings(node: str, steps: Iterable[GpuStep]) -> Iterator[Finding]:
    """Yield what a node's steps show; only what ran and was right is OK."""
    known = {each.id: each for each in smoke_steps()}
    for each in steps:
        if each.step in known:
            yield from _judge_step(node, known[each.step], each)


def _judge_step(node: str, text: SmokeStep, step: GpuStep) -> Iterator[Finding]:
    figures = _Figures({**step.figures, "kernel": step.kernel or "?"})
    proves = text.proves.format_map(figures)
    hint = text.hint.format(command=there(node, *text.look))
    if step.state == "not-run":
        yield unknown(text.id, node, step.reason)
    elif step.state == "failed":
        # What is known of its words comes first: that is the cause, the step is what followed.
        causes = list(_known_causes(node, step))
        yield from causes
        failed = finding_from_text(
            _FILE,
            "gpu-failed",
            node,
            step=text.id,
            seconds=step.seconds,
            reason=step.reason,
            proves=proves,
            hint=hint,
        )
        yield replace(failed, about=text.id)
    else:
        what = _fill_text(text.fine, figures)
        yield Finding(
            level=Level.OK, where=node, about=text.id, what=what, why=f"proves that {proves}"
        )


def _fill_text(text: str, figures: Mapping[str, object]) -> str:
    try:
        return text.format_map(figures)
    except ValueError:  # a figure that should be a number and is none
        return text.replace(":.2g", "").format_map(figures)


def _known_causes(node: str, step: GpuStep) -> Iterator[Finding]:
    text = "\n".join(step.lines).encode()
    for each in read_log([text], whole=False).diagnoses:
        yield diagnosis_finding(each, node, 0)


def all_reduce_findings(
    nodes: Sequence[str],
    ranks: Sequence[GpuStep],
    cable: float | None,
    meant: Sequence[Mapping[str, str]] = (),
) -> Iterator[Finding]:
    """Yield what an all-reduce over all nodes shows.

    ``cable`` is what the way between them carries in GB/s, None where that is not known; ``meant``
    are the variables of each node's env file, against which NCCL's own words are held.
    """
    names = ", ".join(nodes)
    for node, rank in zip(nodes, ranks, strict=True):
        if rank.state == "failed":
            yield from _known_causes(node, rank)
            yield finding_from_text(
                _FILE,
                "all-reduce-failed",
                node,
                nodes=names,
                seconds=rank.seconds,
                reason=rank.reason,
            )
        elif rank.state == "not-run":
            yield unknown(RANK, node, rank.reason)
    if any(rank.state != "ok" for rank in ranks):
        return  # what NCCL took on the way to an error decides nothing
    yield _judge_speed(names, ranks, cable)
    if any(rank.nccl for rank in ranks):
        logs = {node: read_nccl(rank.nccl) for node, rank in zip(nodes, ranks, strict=True)}
        for node, variables in zip(nodes, meant, strict=False):
            yield from nccl_findings(node, logs[node], variables)
        yield from nccl_agreement(logs)


def _judge_speed(names: str, ranks: Sequence[GpuStep], cable: float | None) -> Finding:
    """Return how fast it was: the slowest rank counts, since all wait for it."""
    test, figures = all_reduce_test(), ranks[0].figures
    small, large = test.sizes[0], test.sizes[-1]
    speed = min(_read_figure(rank, f"gigabytes_per_second_{large}") for rank in ranks)
    latency = max(_read_figure(rank, f"microseconds_{small}") for rank in ranks)
    if (backend := str(figures.get("backend", ""))) != "nccl":
        about = "all-reduce-cpu"
    elif cable is None:
        about = "all-reduce-sums"
    elif speed < test.hot_plug:
        about = "all-reduce-hot-plug"
    else:
        about = "all-reduce-speed" if speed >= test.share * cable else "all-reduce-slow"
    return finding_from_text(
        _FILE,
        about,
        names,
        nodes=names,
        speed=speed,
        latency=latency,
        cable=cable or 0.0,
        share=test.share,
        size=large // BYTES_PER_MIB,
        small=small,
        backend=backend,
        nccl=figures.get("nccl", "?"),
        source=_SOURCE,
    )


def _read_figure(rank: GpuStep, name: str) -> float:
    value = rank.figures.get(name, 0)
    return 0.0 if isinstance(value, str) else float(value)


def cable_speed(halves: int) -> float | None:
    """Return GB/s that one cage's cable carries over so many of its halves, None for none."""
    link = network_facts()["link"]
    gbits = {1: link["twin_gbits"][0], 2: link["both_gbits"][0]}.get(halves)
    return None if gbits is None else float(gbits) / 8


# All nodes


def try_gpus(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield what the smoke test shows of each node, side by side, then of all at once.

    It takes minutes, and some memory of the GPU. Raises nothing for a node that does not answer.
    """
    able = [node for report in reports if (node := _gpu_node(report))]
    for report in reports:
        if not _gpu_node(report):
            why = report.why_not("facts") if report.facts is None else "there is no vLLM there"
            yield unknown("gpu-smoke", report.node, why)
    tried = everywhere(able, lambda node: list(smoke(node)))
    for node, steps in zip(able, tried, strict=True):
        if isinstance(steps, PatchkitError):
            yield unknown("gpu-smoke", node.node, steps.what)
        else:
            yield from gpu_findings(node.node, steps)
    if len(reports) > 1:
        yield from _try_together(reports, able, tried)


def _try_together(
    reports: Sequence[NodeReport],
    able: Sequence[GpuNode],
    tried: Sequence[list[GpuStep] | PatchkitError],
) -> Iterator[Finding]:
    names = ", ".join(each.node for each in reports)
    if len(able) < len(reports) or not all(each.address for each in able):
        yield unknown(RANK, names, "not every node has vLLM and an address on the cable")
        return
    for node, steps in zip(able, tried, strict=True):
        # With a GPU that does nothing the others would wait for their time-out.
        if isinstance(steps, PatchkitError) or steps[0].state != "ok":
            yield unknown(RANK, names, f"the GPU of {node.node} was not reached")
            return
    try:
        ranks = all_reduce(able)
    except PatchkitError as error:
        yield unknown(RANK, names, error.what)
        return
    meant = [each.variables for each in able]
    yield from all_reduce_findings(
        [each.node for each in able], ranks, cable_between(reports), meant
    )


def cable_between(reports: Sequence[NodeReport]) -> float | None:
    """Return GB/s of the way between the nodes: of the one with the fewest halves of a cage."""
    counts = []
    for report in reports:
        if report.facts is None:
            return None
        netdevs = report.facts.host.netdevs
        own = [each for each in netdevs if report.address in {str(a.ip) for a in each.ipv4}]
        cages = {each.cage for each in own if each.cage is not None}
        counts.append(sum(each.cage in cages and bool(each.carrier) for each in netdevs))
    return cable_speed(min(min(counts, default=0), 2))


def _gpu_node(report: NodeReport) -> GpuNode | None:
    facts = report.facts
    if facts is None or not facts.venv or facts.host.software is None:
        return None
    env = report.placed.env if report.placed else None
    return GpuNode(
        node=report.node,
        python=f"{facts.venv}/bin/python",
        address=report.address,
        variables=env.variables if env else {},
    )
