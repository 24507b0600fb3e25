"""Run the parts of a proof, which an owner of a machine hands on.

Each part has a time limit. The result of a part that cannot run says why.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from copy import deepcopy
from dataclasses import replace
from datetime import date
from itertools import chain
from pathlib import Path

from patchkit import __version__
from patchkit.cluster.agent.node_facts import NodeFacts
from patchkit.cluster.bench.benchmark import BenchLoad, MeasuredServer, run_benchmark
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
    free_port,
    gpu_steps,
)
from patchkit.doctor.installed_code import look_at_device_code
from patchkit.doctor.nccl_lines import read_nccl
from patchkit.doctor.peers.node_report import NodeReport
from patchkit.doctor.private_names import private_names
from patchkit.doctor.proof_record import SCHEMA, Proof, pack_proof
from patchkit.durable.signals import Interrupted, deferred, undeferred
from patchkit.durable.staging import ScratchFolder
from patchkit.errors import BusyError, HostError, PatchkitError
from patchkit.frozen import Fields, Values, frozen
from patchkit.http_exchange import HttpServer
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.host.host import Gpu, Software
from patchkit.runtime.python.startup import VLLM
from patchkit.runtime.rules.variable_rules import cache_variables
from patchkit.units import BYTES_PER_GIB, KIB_PER_GIB

_LOG = 2000  # lines of a server's log that are kept
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
    """What a proof tries: the GPU of the first node, all nodes together, and starts of a model.

    ``vllm`` is the version of vLLM. ``apart`` says why nodes are not tried together, "" if they
    are. ``model`` is "" for random weights. ``args`` are further arguments of `vllm serve`.
    ``folder`` is a scratch folder for caches and logs.
    """

    nodes: Sequence[GpuNode]
    vllm: str
    free_gib: float
    apart: str
    model: str
    args: Sequence[str]
    folder: Path


def collect_proof(
    cluster: Cluster,
    model: str,
    args: Sequence[str],
    tell: Tell,
) -> tuple[Proof, bytes, Interrupted | None]:
    """Run all parts; return the proof, its archive, and an interrupt that stopped it, or None.

    ``args`` are further arguments of `vllm serve`. ``tell`` gets lines about the progress.
    Raise BusyError if a model is served, and HostError if this machine is not the first node or
    has no Python with vLLM.
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
        code = look_at_device_code(software.vllm_home, 0, "")["codes"]

    quiet = {**PROOF_SETTINGS["variables"], "HF_HUB_OFFLINE": "0" if model else "1"}
    with ScratchFolder() as place:
        nodes = [
            replace(node, variables={**node.variables, **quiet})
            for node in find_gpu_nodes(examination.reports)
        ]
        request = ProofRequest(
            nodes=nodes,
            vllm=software.vllm,
            free_gib=host.memory.available / KIB_PER_GIB if host.memory else 0.0,
            apart=find_gap(examination.reports, nodes),
            model=model,
            args=args,
            folder=Path(place),
        )

        parts, interrupt = run_parts(request, tell)

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
        model=model or "random weights",
        seconds=round(time.monotonic() - began, 1),
        parts=tuple(replace(part, lines=()) for part in parts),
        code=code,
        machines=content["nodes"],
        findings=content["findings"],
    )

    logs = {part.step: "\n".join(part.lines) for part in parts}
    logs["journal"] = content["journal"]
    names = private_names(examination.reports, model)
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
        measure_starts: ["serve-cold", "serve-warm"],
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


def measure_starts(request: ProofRequest) -> Iterator[GpuStep]:
    """Serve a model with empty caches, then with the caches that the first start filled.

    Yield the measurements of both starts. Raise HostError if the memory or the disk has too little
    room, or after the result of a start that failed.
    """
    if request.free_gib < PROOF_SETTINGS["free_gib"]:
        raise HostError(f"only {request.free_gib:.0f} GiB of memory are free")

    least = PROOF_SETTINGS["disk_gib"]
    if shutil.disk_usage(request.folder).free < least * BYTES_PER_GIB:
        raise HostError(f"less than {least} GiB are free for {request.folder}")

    write_random_model(request.folder / "model")
    for name in ("serve-cold", "serve-warm"):
        part = measure_start(request, name)
        yield part
        if part.reason:
            raise HostError(f"the first start failed: {part.reason}")


def write_random_model(folder: Path) -> None:
    """Write the config and the tokenizer of a model without weights: vLLM makes random ones."""
    files = deepcopy(PROOF_SETTINGS["serve"]["files"])

    size = files["config"]["vocab_size"]
    vocabulary = {f"w{number}": number for number in range(size)}
    files["tokenizer"]["model"]["vocab"] = vocabulary

    folder.mkdir()
    for name, content in files.items():
        text = json.dumps(content)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


def measure_start(request: ProofRequest, name: str) -> GpuStep:
    """Start a server, measure it, and end it.

    Return the seconds of the start, and the figures of ``measure_stream``. A start that fails is
    a result with the state "failed".
    """
    settings = PROOF_SETTINGS["serve"]
    node = request.nodes[0]
    folder = request.folder
    model = request.model or str(folder / "model")
    port = str(free_port("127.0.0.1"))
    url = f"http://127.0.0.1:{port}"

    words = [
        node.python,
        *VLLM,
        "serve",
        model,
        "--port",
        port,
        *settings["words"],
    ]
    if not request.model:
        words += settings["random"]

    words += request.args
    env = {
        **os.environ,
        **node.variables,
        **cache_variables(str(folder), request.vllm),
    }

    log = folder / f"{name}.log"
    reason = ""
    figures: Fields = {}

    begin = time.monotonic()
    try:
        with hold_server(words, env, log) as server:
            wait_until_ready(server, url, begin + settings["seconds"])
            figures["ready_s"] = round(time.monotonic() - begin, 1)

            measured = MeasuredServer(
                url=url,
                python=node.python,
                model="proof",
                tokenizer=model,
            )
            result_file = folder / f"{name}.json"
            figures |= measure_stream(measured, result_file, server.pid)
    except PatchkitError as error:
        reason = error.what

    lines = log.read_text(
        encoding="utf-8",
        errors="replace",
    ).splitlines()
    return GpuStep(
        step=name,
        state="failed" if reason else "ok",
        seconds=round(time.monotonic() - begin, 1),
        reason=reason,
        figures=figures,
        lines=tuple(lines[-_LOG:]),
    )


def measure_stream(
    server: MeasuredServer,
    result_file: Path,
    session: int,
) -> dict[str, float]:
    """Return the figures of `vllm bench serve` for one stream, and the CPU cores the server uses.

    ``session`` is the id of the server's session. The server idles while the benchmark starts:
    the CPU time of an idle server is subtracted for these seconds. The benchmark's duration lacks
    the first request, which warms the server up, so the duration is extended by one request.
    """
    settings = PROOF_SETTINGS["serve"]
    tick = os.sysconf("SC_CLK_TCK")

    before = sum(session_ticks(session))
    began = time.monotonic()
    load = BenchLoad(**settings["load"])
    answer = run_benchmark(server, load, result_file, seconds=settings["seconds"])
    wall = time.monotonic() - began
    used = sum(session_ticks(session)) - before

    time.sleep(settings["spin"])
    at_rest = sum(session_ticks(session))
    time.sleep(settings["idle"])
    idle = sum(session_ticks(session)) - at_rest
    idle_cores = idle / tick / settings["idle"]

    figures = {}
    for name, key in settings["figures"].items():
        if key in answer:
            figures[name] = answer[key]

    busy = answer["duration"] * (load.prompts + 1) / load.prompts
    beside = idle_cores * max(wall - busy, 0.0)
    figures["cores_busy"] = (used / tick - beside) / busy
    figures["cores_idle"] = idle_cores
    return {name: round(value, 2) for name, value in figures.items()}


@contextlib.contextmanager
def hold_server(
    command: Sequence[str],
    env: Values,
    log: Path,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in a session of its own; end all processes of the session after the block."""
    # Defer interrupts while the server starts and ends: else a process could be left running.
    with deferred(), log.open("wb") as out:
        server = subprocess.Popen(
            command,
            env=env,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
        try:
            with undeferred():
                yield server
        finally:
            end_session(server)


def end_session(server: subprocess.Popen[bytes]) -> None:
    """End all processes of a server's session: by SIGTERM, and by SIGKILL after 20 seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)

        end = time.monotonic() + _GRACE
        while server.poll() is None or session_ticks(server.pid):
            if time.monotonic() > end:
                break
            time.sleep(0.1)


def wait_until_ready(
    server: subprocess.Popen[bytes],
    url: str,
    end: float,
) -> None:
    """Return once a server answers.

    Raise HostError if the server ends before, or at ``end``, a time of ``time.monotonic()``.
    """
    while time.monotonic() < end:
        if server.poll() is not None:
            raise HostError(f"the server ended with {server.returncode}: see its log")
        if HttpServer(url).ask("/health", seconds=2).status == 200:
            return
        time.sleep(0.2)

    raise HostError("the server did not answer in time: see its log")


def session_ticks(session: int) -> list[int]:
    """Return the CPU time so far, in clock ticks, of each process of a session but zombies."""
    ticks = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            numbers = path.read_text(errors="replace").rpartition(")")[2].split()
            if int(numbers[3]) == session and numbers[0] != "Z":
                ticks.append(int(numbers[11]) + int(numbers[12]))

    return ticks
