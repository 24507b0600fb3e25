"""Run the parts of a proof, which an owner of a machine hands on.

Each part has a time limit. The result of a part that cannot run says why.
"""

import contextlib
import time
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from datetime import date
from itertools import chain

from patchkit import __version__
from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.launch.cluster import Cluster
from patchkit.doctor.examination import examine_cluster
from patchkit.doctor.gpu import (
    SMOKE_TEST,
    GpuNode,
    find_gap,
    find_gpu_nodes,
    run_all_reduce,
    slowest_figures,
)
from patchkit.doctor.gpu_steps import (
    GpuStep,
    gpu_steps,
)
from patchkit.doctor.installed_code import look_at_device_code
from patchkit.doctor.nccl_lines import read_nccl
from patchkit.doctor.peers.node_report import NodeReport
from patchkit.doctor.private_names import private_names
from patchkit.doctor.proof_record import SCHEMA, Proof, pack_proof
from patchkit.doctor.step_measure import read_step
from patchkit.durable.signals import Interrupted
from patchkit.errors import BusyError, HostError, PatchkitError
from patchkit.frozen import Fields, frozen
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.host.host import Gpu, Software

_GRACE = 20.0  # seconds
PROOF_SETTINGS = read_toml(
    Fields,
    RECIPES / "doctor" / "proof.toml",
    key="proof",
)
_STEPS = [
    *SMOKE_TEST["step"],
    *({**PROOF_SETTINGS["routing"], **step} for step in PROOF_SETTINGS["step"]),
]
Tell = Callable[[str], None]


@frozen
class ProofRequest:
    """What a proof tries: the GPU of the first node, and all nodes together.

    ``apart`` says why nodes are not tried together, "" if they are.
    """

    nodes: Sequence[GpuNode]
    apart: str


def collect_proof(
    cluster: Cluster,
    tell: Tell,
) -> tuple[Proof, bytes, Interrupted | None]:
    """Run all parts; return the proof, its archive, and an interrupt that stopped it, or None.

    ``tell`` gets lines about the progress. Raise BusyError if a model is served, and HostError if
    this machine is not the first node or has no Python with vLLM.
    """
    if not cluster.head.here:
        first = f"{cluster.head.destination} is not this machine"
        raise HostError(first, hint="run it on the first node of cluster.toml")

    began = time.monotonic()
    tell("facts: a minute")
    examination = examine_cluster(cluster, is_local=len(cluster.nodes) == 1)
    check_free(examination.reports)
    report = examination.reports[0]
    if report.facts is None:
        raise HostError(report.why_not("facts"))

    software = require_vllm(report.facts, cluster.venv)
    host = report.facts.host

    tell("libraries: their device code")
    code: Mapping[str, Mapping[str, int]] = {}
    with contextlib.suppress(PatchkitError, OSError):
        code = look_at_device_code(software.vllm_home, 0, "").codes

    quiet = PROOF_SETTINGS["variables"]
    nodes = [
        replace(node, variables={**node.variables, **quiet})
        for node in find_gpu_nodes(examination.reports)
    ]
    apart = find_gap(examination.reports, nodes)
    parts, interrupt = run_parts(ProofRequest(nodes=nodes, apart=apart), tell)

    gpu = next(iter(host.gpus), Gpu(name="no GPU"))
    content = examination.report_content()
    proof = Proof(
        schema=SCHEMA,
        patchkit=__version__,
        date=date.today().isoformat(),
        device=gpu.name,
        capability=gpu.capability,
        driver=gpu.driver,
        vllm=software.vllm,
        torch=software.torch,
        seconds=round(time.monotonic() - began, 1),
        parts=tuple(replace(part, lines=()) for part in parts),
        code=code,
        machines=content["nodes"],
        findings=content["findings"],
        step=read_step(),
    )

    logs = {part.step: "\n".join(part.lines) for part in parts}
    logs["journal"] = content["journal"]
    names = private_names(examination.reports)
    clean_proof, archive = pack_proof(proof, logs, names)
    return clean_proof, archive, interrupt


def require_vllm(facts: NodeFacts, venv: str) -> Software:
    """Return the software of the environment ``venv``.

    Raise HostError unless the environment has a Python with vLLM.
    """
    software = facts.host.software or Software(python="")
    if facts.venv and software.vllm:
        return software

    if software.vllm:
        reason = f"vLLM {software.vllm} is imported by {software.python}, which is not that one"
    else:
        reason = "it has none" if facts.venv else "there is none"

    raise HostError(
        f"{venv}/bin/python: no Python with vLLM is there",
        why=reason,
        hint="name the environment that has it: patchkit proof -o FILE --venv DIR",
    )


def check_free(reports: Sequence[NodeReport]) -> None:
    """Raise BusyError if a model is served on one of the nodes."""
    for report in reports:
        if report.state and report.state.left:
            reason = (
                "what is served takes the GPU and its memory: figures would be wrong"
            )
            raise BusyError(
                f"{report.node}: {report.state.left}",
                why=reason,
                hint="patchkit down",
            )


def plan_parts() -> dict[Callable[[ProofRequest], Iterable[GpuStep]], list[str]]:
    """Return function → the names of the parts that it runs, in the order of the proof."""
    return {
        try_gpu: [step["step"] for step in _STEPS],
        time_paths: [path["step"] for path in PROOF_SETTINGS["path"]],
    }


def run_parts(
    request: ProofRequest,
    tell: Tell,
) -> tuple[list[GpuStep], Interrupted | None]:
    """Return the results of all parts, and an interrupt that stopped the proof, or None.

    A part that raises an error or comes after an interrupt is "not-run", with the reason.
    """
    parts: list[GpuStep] = []
    obstacle = ""
    interrupt = None

    for run, names in plan_parts().items():
        reason = obstacle
        try:
            if not obstacle:
                tell(f"next: {names[0]} to {names[-1]}")
                for part in run(request):
                    parts.append(part)
                    tell(f"{part.step}: {part.state}, {part.seconds:.0f} s")
        except (PatchkitError, OSError, LookupError) as error:
            reason = str(error).partition("\n")[0]
        except Interrupted as error:
            interrupt = error
            obstacle = reason = "interrupted"

        done = {part.step for part in parts}
        parts += [
            GpuStep(
                step=name,
                state="not-run",
                reason=reason,
            )
            for name in names
            if name not in done
        ]
        # Without the device, which is the first part, no other part can be tried.
        obstacle = obstacle or parts[0].reason

    return parts, interrupt


def try_gpu(request: ProofRequest) -> Iterator[GpuStep]:
    """Yield the results of the steps of `doctor --gpu`, and of those that build models."""
    node = request.nodes[0]
    return gpu_steps(node.python, _STEPS, node.variables)


def time_paths(request: ProofRequest) -> Iterator[GpuStep]:
    """Yield for each network path how long an all-reduce of all nodes takes for each size.

    Raise HostError if the nodes cannot be tried together.
    """
    if request.apart:
        raise HostError(request.apart)

    for step in PROOF_SETTINGS["path"]:
        yield judge_ranks(run_all_reduce(request.nodes, step), step["network"])


def judge_ranks(ranks: Sequence[GpuStep], network: str) -> GpuStep:
    """Return one result for the ranks of an all-reduce.

    If NCCL took another network than ``network``, the result has no figures, and is "not-run".
    """
    failures = [
        f"rank {number}: {rank.reason}"
        for number, rank in enumerate(ranks)
        if rank.reason
    ]

    lines = tuple(chain.from_iterable(rank.lines for rank in ranks))
    networks = sorted({answer.network for answer in read_nccl(lines)})
    is_expected = all(name.startswith(network) for name in networks)
    result = replace(
        ranks[0],
        state="failed" if failures else "ok",
        seconds=max(rank.seconds for rank in ranks),
        kernel=", ".join(networks),
        reason="; ".join(failures),
        figures=slowest_figures(ranks) if is_expected else {},
        lines=lines,
    )
    if is_expected or failures:
        return result

    return replace(result, state="not-run", reason=f"NCCL took no {network}")
