"""Have nodes try their GPUs, one by one and together; say what ran, was right, and was not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from patchkit.cluster.ssh.node import Remote, everywhere
from patchkit.doctor.gpu_steps import RANK, GpuStep, free_port, gpu_steps
from patchkit.doctor.nccl_lines import nccl_findings, read_nccl
from patchkit.doctor.peers.node_report import (
    NodeReport,
    make_finding,
    make_fine,
    unchecked,
)
from patchkit.doctor.symptoms.diagnosis import read_log
from patchkit.doctor.symptoms.findings import diagnosis_finding
from patchkit.errors import PatchkitError
from patchkit.finding import Finding
from patchkit.records import RECIPES, read_toml
from patchkit.units import BYTES_PER_MIB

_FIGURES = (
    *("device", "capability", "driver", "torch", "cuda", "free_gib", "memory_gib"),
    *("triton", "compile_seconds", "vllm", "error", "bound", "scales"),
)
# So that NCCL says on standard output what it takes.
_SAYS = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
    "NCCL_DEBUG_FILE": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeStep:
    """A step: its name in the script, and its settings."""

    step: str
    script: str
    seconds: int
    block: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeTest:
    """The steps of a node, in their order, and how all nodes are tried at once."""

    step: tuple[SmokeStep, ...]
    seconds: int
    sizes: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNode:
    """A node whose GPU is tried, with the Python that has vLLM and its env file's variables."""

    node: str
    python: str
    address: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


@cache
def smoke_test() -> SmokeTest:
    return read_toml(SmokeTest, RECIPES / "doctor" / "gpu.toml", key="smoke")


def run_steps(
    node: GpuNode, steps: Sequence[Mapping[str, Any]], more: Mapping[str, str] = {}
) -> list[GpuStep]:
    """Return how each step went on a node. Raises HostError if it does not answer."""
    given = {
        "python": node.python,
        "steps": steps,
        "variables": {**node.variables, **more},
    }
    return list(Remote(node.node).stream(GpuStep, gpu_steps, **given))


def run_all_reduce(
    nodes: Sequence[GpuNode],
    sizes: Sequence[int] = (),
    variables: Mapping[str, str] = _SAYS,
) -> list[GpuStep]:
    """Return how each rank of an all-reduce over all nodes went, the head's first.

    They meet at the first one's address. Raises HostError if the head does not answer.
    """
    head, test = nodes[0], smoke_test()
    port = Remote(head.node).call(int, free_port, address=head.address)
    common: dict[str, Any] = {
        "step": RANK,
        "script": RANK,
        "world": len(nodes),
        "meeting": f"tcp://{head.address}:{port}",
        "sizes": list(sizes or test.sizes),
        "seconds": test.seconds,
    }
    ranks = [(node, [{**common, "rank": number}]) for number, node in enumerate(nodes)]
    return [
        GpuStep(step=RANK, state="not-run", reason=said.what)
        if isinstance(said, PatchkitError)
        else said[0]
        for said in everywhere(
            ranks, lambda each: run_steps(*each, {**_SAYS, **variables})
        )
    ]


def gpu_findings(node: str, steps: Iterable[GpuStep]) -> Iterator[Finding]:
    """Yield what a node's steps show; only what ran and was right is OK."""
    for step in steps:
        if step.state == "not-run":
            yield unchecked(step.step, node, step.reason)
        elif step.state == "failed":
            # What is known of its words comes first: that is the cause, the step is what followed.
            yield from _known_causes(node, step)
            yield make_finding(
                step.step, node, seconds=step.seconds, reason=step.reason
            )
        else:
            figures = {name: step.figures.get(name, "?") for name in _FIGURES}
            yield make_fine(step.step, node, kernel=step.kernel or "?", **figures)


def _known_causes(node: str, step: GpuStep) -> Iterator[Finding]:
    text = "\n".join(step.lines).encode()
    for diagnosis in read_log([text], whole=False).diagnoses:
        yield replace(diagnosis_finding(diagnosis), where=node, line=0)


def all_reduce_findings(
    nodes: Sequence[GpuNode], ranks: Sequence[GpuStep]
) -> Iterator[Finding]:
    """Yield what an all-reduce over all nodes shows."""
    names = ", ".join(node.node for node in nodes)
    for node, rank in zip(nodes, ranks, strict=True):
        if rank.state == "failed":
            yield from _known_causes(node.node, rank)
            fields = {"nodes": names, "seconds": rank.seconds, "reason": rank.reason}
            yield make_finding("all-reduce-failed", node.node, **fields)
        elif rank.state == "not-run":
            yield unchecked(RANK, node.node, rank.reason)
    if any(rank.state != "ok" for rank in ranks):
        return  # what NCCL took on the way to an error decides nothing
    small, large = smoke_test().sizes
    # The slowest rank counts, since all wait for it.
    speed = min(
        float(rank.figures.get(f"gigabytes_per_second_{large}", 0)) for rank in ranks
    )
    latency = max(float(rank.figures.get(f"microseconds_{small}", 0)) for rank in ranks)
    fields = {"nodes": names, "small": small, "size": large // BYTES_PER_MIB}
    fields |= {
        "speed": speed,
        "latency": latency,
        "nccl": ranks[0].figures.get("nccl", "?"),
    }
    yield make_finding("all-reduce-sums", names, **fields)
    for node, rank in zip(nodes, ranks, strict=True):
        if said := read_nccl(rank.lines):
            yield from nccl_findings(node.node, said, node.variables)


# All nodes


def find_gpu_nodes(reports: Sequence[NodeReport]) -> list[GpuNode]:
    """Return the nodes that have a Python with vLLM, or may have one.

    Without an env file NCCL is told the interface of the node's address: it might take another.
    """
    nodes = []
    for report in reports:
        if report.facts and report.facts.venv and (host := report.facts.host).software:
            netdev = host.netdev_of(report.address)
            variables = {"NCCL_SOCKET_IFNAME": f"={netdev.name}"} if netdev else {}
            variables |= report.env.variables if report.env else {}
            python, its = f"{report.facts.venv}/bin/python", {"address": report.address}
            nodes.append(
                GpuNode(node=report.node, python=python, variables=variables, **its)
            )
    return nodes


def try_gpus(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield what the smoke test shows of each node, side by side, then of all at once.

    It takes minutes, and some memory of the GPU. Raises nothing for a node that does not answer.
    """
    able = find_gpu_nodes(reports)
    for report in reports:
        if report.node not in (node.node for node in able):
            why = (
                report.why_not("facts")
                if report.facts is None
                else "there is no vLLM there"
            )
            yield unchecked("gpu-smoke", report.node, why)
    steps = [asdict(its) for its in smoke_test().step]
    tried = everywhere(able, lambda node: run_steps(node, steps))
    obstacle = ""
    for node, said in zip(able, tried, strict=True):
        if isinstance(said, PatchkitError):
            yield unchecked("gpu-smoke", node.node, said.what)
        else:
            yield from gpu_findings(node.node, said)
        # With a GPU that does nothing the others would wait for their time-out.
        if isinstance(said, PatchkitError) or said[0].state != "ok":
            obstacle = obstacle or f"the GPU of {node.node} was not reached"
    if len(able) < len(reports) or not all(node.address for node in able):
        obstacle = "not every node has vLLM and an address on the cable"
    if len(reports) < 2:
        return
    try:
        ranks = [] if obstacle else run_all_reduce(able)
    except PatchkitError as error:
        obstacle = error.what
    if obstacle:
        yield unchecked(RANK, ", ".join(report.node for report in reports), obstacle)
    else:
        yield from all_reduce_findings(able, ranks)
