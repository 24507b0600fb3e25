"""Have nodes try their GPUs, each by itself and all together, and judge the results."""

from collections import defaultdict
from collections.abc import (
    Iterable,
    Sequence,
)
from dataclasses import replace

from patchkit.cluster.ssh.node import Remote, require_all, run_on_all
from patchkit.cluster.ssh.ssh import make_finding, make_fine, unchecked
from patchkit.doctor.gpu_steps import GpuStep, free_port, gpu_steps
from patchkit.doctor.nccl_lines import nccl_findings, read_nccl
from patchkit.doctor.peers.node_report import Reports
from patchkit.doctor.symptoms.diagnosis import read_log
from patchkit.doctor.symptoms.findings import diagnosis_finding
from patchkit.errors import HostError, PatchkitError
from patchkit.finding import Findings
from patchkit.frozen import Fields, Values, frozen
from patchkit.records import RECIPES, read_toml

SMOKE_TEST = read_toml(
    Fields,
    RECIPES / "doctor" / "gpu.toml",
    key="smoke",
)
"""The steps that a node runs, in order, and the step of all nodes together."""


@frozen
class GpuNode:
    """A node whose GPU is tried: its Python with vLLM, and the variables of the node's env file."""

    node: str
    python: str
    address: str
    variables: Values


def run_steps(
    node: GpuNode,
    steps: Sequence[Fields],
) -> list[GpuStep]:
    """Run steps on a node; return their results, "not-run" for all if it does not answer."""
    results = Remote(node.node).stream(
        GpuStep,
        gpu_steps,
        python=node.python,
        steps=steps,
        variables=node.variables,
    )
    try:
        return list(results)
    except PatchkitError as error:
        return [
            GpuStep(
                step=step["step"],
                state="not-run",
                reason=error.what,
            )
            for step in steps
        ]


def run_all_reduce(
    nodes: Sequence[GpuNode],
    step: Fields,
) -> list[GpuStep]:
    """Run an all-reduce over all nodes, and return the result of each rank in their order.

    ``step`` are its settings. The first node is the head: all ranks meet at its address. Raise
    HostError if the head does not answer when it is asked for a port.
    """
    head = nodes[0]

    port = Remote(head.node).call(int, free_port, address=head.address)

    def run_rank(rank: int) -> GpuStep:
        settings = {
            **step,
            "rank": rank,
            "world": len(nodes),
            "meeting": f"tcp://{head.address}:{port}",
        }
        return run_steps(nodes[rank], [settings])[0]

    return require_all(run_on_all(range(len(nodes)), run_rank))


def gpu_findings(node: str, steps: Iterable[GpuStep]) -> Findings:
    """Yield the findings of a node's steps: OK only for a step that ran with a right result."""
    for step in steps:
        yield from _trouble(node, step.step, step)
        if step.state == "ok":
            yield make_fine(
                step.step,
                node,
                kernel=step.kernel or "?",
                figures=defaultdict(lambda: "?", step.figures),
            )


def _trouble(
    node: str,
    about: str,
    step: GpuStep,
    **fields: object,
) -> Findings:
    """Yield why a step was not run, or its known causes and then that it failed.

    Yield nothing for a step that is ok.
    """
    if step.state == "not-run":
        yield unchecked(step.step, node, step.reason)
    elif step.state == "failed":
        text = "\n".join(step.lines).encode()
        for diagnosis in read_log([text], whole=False).diagnoses:
            yield replace(diagnosis_finding(diagnosis), where=node, line=0)

        yield make_finding(
            about,
            node,
            seconds=step.seconds,
            reason=step.reason,
            **fields,
        )


def all_reduce_findings(
    nodes: Sequence[GpuNode],
    ranks: Sequence[GpuStep],
) -> Findings:
    """Yield the findings of an all-reduce: failures of ranks, else the speed and NCCL's network."""
    names = ", ".join(node.node for node in nodes)
    for node, rank in zip(nodes, ranks, strict=True):
        yield from _trouble(node.node, "all-reduce-failed", rank, nodes=names)

    # A rank that failed may have printed a network that it never used.
    if all(rank.state == "ok" for rank in ranks):
        # The slowest rank counts, since all other ranks wait for it.
        yield make_finding(
            "all-reduce-sums",
            names,
            figures=defaultdict(float, slowest_figures(ranks)),
        )
        for node, rank in zip(nodes, ranks, strict=True):
            if nccl_ranks := read_nccl(rank.lines):
                yield from nccl_findings(node.node, nccl_ranks, node.variables)


def slowest_figures(ranks: Sequence[GpuStep]) -> Fields:
    """Return the worst value of each figure over all ranks, and the best speed over all sizes.

    The largest of the times counts, and the smallest of all other figures. The best speed is
    ``most_gigabytes_per_second``.
    """
    figures: Fields = {}
    for key, value in ranks[0].figures.items():
        slowest = max if key.startswith("micro") else min
        values = [rank.figures.get(key, value) for rank in ranks]
        figures[key] = slowest(values)

    speeds = [value for key, value in figures.items() if key.startswith("gigabytes")]
    if speeds:
        figures["most_gigabytes_per_second"] = max(speeds)

    return figures


# All nodes


def find_gpu_nodes(reports: Reports) -> list[GpuNode]:
    """Return the nodes whose environment has a Python that answered; it may lack vLLM.

    NCCL gets the interface of the node's address, since it might take another one. A value of
    the node's env file, if there is one, replaces that.
    """
    nodes = []
    for report in reports:
        facts = report.facts
        if facts is None or not facts.venv or not facts.host.software:
            continue

        variables = {}
        if netdev := facts.host.netdev_of(report.address):
            variables["NCCL_SOCKET_IFNAME"] = f"={netdev.name}"

        if report.env:
            variables.update(report.env.variables)

        node = GpuNode(
            node=report.node,
            python=f"{facts.venv}/bin/python",
            address=report.address,
            variables=variables,
        )

        nodes.append(node)

    return nodes


def find_gap(
    reports: Reports,
    nodes: Sequence[GpuNode],
) -> str:
    """Return why the nodes cannot be tried together, "" if they can."""
    if len(reports) < 2:
        return "one node was asked: --cluster names several"

    have_addresses = all(node.address for node in nodes)
    if len(nodes) < len(reports) or not have_addresses:
        return "not every node has vLLM and an address on the cable"

    return ""


def try_gpus(reports: Reports) -> Findings:
    """Run the smoke test on all nodes at the same time, then one over all nodes together.

    Yield the findings. The test takes minutes and some memory of the GPU. A node that does not
    answer is a finding.
    """
    nodes = find_gpu_nodes(reports)

    names = {node.node for node in nodes}
    for report in reports:
        if report.node not in names:
            reason = "there is no vLLM there"
            if report.facts is None:
                reason = report.why_not("facts")
            yield unchecked("gpu-smoke", report.node, reason)

    unreached = ""
    steps = SMOKE_TEST["step"]
    answers = run_on_all(nodes, lambda node: run_steps(node, steps))
    for node, results in zip(nodes, require_all(answers), strict=True):
        yield from gpu_findings(node.node, results)

        # The other ranks would wait for this node's rank until their time-out.
        if results[0].state != "ok" and not unreached:
            unreached = f"the GPU of {node.node} was not reached"

    if len(reports) > 1:
        obstacle = find_gap(reports, nodes) or unreached
        yield from _try_together(reports, nodes, obstacle)


def _try_together(
    reports: Reports,
    nodes: Sequence[GpuNode],
    obstacle: str,
) -> Findings:
    step = SMOKE_TEST["together"]
    try:
        if obstacle:
            raise HostError(obstacle)
        ranks = run_all_reduce(nodes, step)
    except PatchkitError as error:
        names = ", ".join(report.node for report in reports)
        yield unchecked(step["step"], names, error.what)
    else:
        yield from all_reduce_findings(nodes, ranks)
