"""Have the nodes of a cluster try their GPUs, one by one and together, and judge how they did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from patchkit.cluster.ssh.everywhere import everywhere
from patchkit.doctor.gpu import all_reduce_findings, cable_speed, gpu_findings
from patchkit.doctor.peers.check import unknown
from patchkit.doctor.peers.report import NodeReport
from patchkit.doctor.smoke.smoke import GpuNode, all_reduce, smoke
from patchkit.doctor.smoke.steps import RANK, GpuStep
from patchkit.errors import PatchkitError
from patchkit.finding import Finding

_BETWEEN = "gpu-smoke"


def gpu_visit(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield what the smoke test shows of each node, side by side, then of all at once.

    It takes minutes, and some memory of the GPU. Raises nothing for a node that does not answer.
    """
    able = [node for report in reports if (node := _gpu_node(report))]
    for report in reports:
        if not _gpu_node(report):
            why = report.why_not("facts") if report.facts is None else "there is no vLLM there"
            yield unknown(_BETWEEN, report.node, why)
    tried = everywhere(able, lambda node: list(smoke(node)))
    for node, steps in zip(able, tried, strict=True):
        if isinstance(steps, PatchkitError):
            yield unknown(_BETWEEN, node.node, steps.what)
        else:
            yield from gpu_findings(node.node, steps)
    if len(reports) > 1:
        yield from _together(reports, able, tried)


def _together(
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
    yield from all_reduce_findings([each.node for each in able], ranks, cable(reports), meant)


def cable(reports: Sequence[NodeReport]) -> float | None:
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
