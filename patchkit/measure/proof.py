"""Run the parts of an owner's proof, each within its limit; what cannot run says why."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from patchkit import __version__
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.openai.http_exchange import HttpServer
from patchkit.cluster.ssh.node import everywhere
from patchkit.doctor.bundle import private_names
from patchkit.doctor.gpu import GpuNode, find_gpu_nodes, run_all_reduce, smoke_test
from patchkit.doctor.gpu_steps import GpuStep, free_port, gpu_steps, run_step
from patchkit.doctor.peers.node_report import NodeReport
from patchkit.doctor.visit import visit
from patchkit.durable.signals import deferred
from patchkit.durable.staging import ScratchFolder
from patchkit.errors import BusyError, HostError, PatchkitError
from patchkit.measure import proof_script
from patchkit.measure.device_code import look_at_device_code
from patchkit.measure.figures import result_file
from patchkit.measure.proof_archive import SCHEMA, Proof, pack_proof
from patchkit.measure.rounds import BenchPlan, measure_variants
from patchkit.measure.variants import VLLM, BenchLoad, PlannedVariant
from patchkit.reading import read_text
from patchkit.records import RECIPES, read_json, read_toml
from patchkit.runtime.host.host import Host
from patchkit.runtime.rules.variable_rules import cache_variables
from patchkit.units import BYTES_PER_GIB, KIB_PER_GIB

_FIGURES = {"output_throughput": "tokens_per_s", "median_ttft_ms": "ttft_ms"}
_CHOSE = re.compile(r"(?:Selected|Using) '?(\w+)'? (?:for \w+|\w+ MoE backend)")  # vLLM's own words
_LOG = 2000  # lines of a server's log that are kept
_GRACE, _SPIN = 20.0, 2.0  # seconds; a reader of the ring spins for one before it rests
# A proof is of this machine: nothing is asked for or told elsewhere, or compiled for what may come.
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DEEP_GEMM_WARMUP": "skip"}
_STARTS = ("serve-cold", "serve-warm")
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofRequest:
    """What is proved: the GPU of the first node, all nodes together, and a model's starts.

    ``host`` is the first node's, ``apart`` why nodes are not tried together, "" if they are;
    ``model`` is "" for random weights, ``args`` are more words of `vllm serve`.
    """

    nodes: Sequence[GpuNode]
    host: Host
    apart: str
    model: str = ""
    args: Sequence[str] = ()

    @property
    def free_gib(self) -> float:
        return self.host.memory.available / KIB_PER_GIB if self.host.memory else 0.0


@cache
def proof_settings() -> dict[str, Any]:
    return read_toml(dict[str, Any], RECIPES / "doctor" / "proof.toml", key="proof")


def describe_model(model: str) -> str:
    """Return what a model takes, before it is served."""
    sizes = [file.stat().st_size for file in Path(model).glob("*") if file.is_file()]
    if not model:
        gib = proof_settings()["serve"]["gib"]
        return f"serves random weights: {gib} GiB of memory; nothing is downloaded"
    size = f"{sum(sizes) / BYTES_PER_GIB:.1f} GiB" if sizes else "vLLM downloads what is not here"
    return f"serves {model}: {size}"


def collect_proof(
    cluster: Cluster, model: str, args: Sequence[str], tell: Tell
) -> tuple[Proof, bytes]:
    """Return a proof and its archive. Raises BusyError if something is served, HostError."""
    if not cluster.head.here:
        first = f"{cluster.head.destination} is not this machine"
        raise HostError(first, hint="run it on the first node of cluster.toml")
    tell("facts: a minute")
    visited = visit(cluster, here=len(cluster.nodes) == 1)
    check_free(visited.reports)
    report, nodes = visited.reports[0], find_gpu_nodes(visited.reports)
    apart = "one node was asked: --cluster names several" if len(visited.reports) < 2 else ""
    if len(nodes) < len(visited.reports) or not all(node.address for node in nodes):
        apart = apart or "not every node has vLLM and an address on the cable"
    host = report.facts.host if report.facts else None
    software, gpu = (host.software, next(iter(host.gpus), None)) if host else (None, None)
    code: Mapping[str, Mapping[str, int]] = {}
    if host and software and software.vllm:
        tell("libraries: their device code")
        with contextlib.suppress(PatchkitError, OSError):
            code = look_at_device_code(software.vllm_home, 0, "")["codes"]
        request = ProofRequest(nodes=nodes, host=host, apart=apart, model=model, args=args)
        parts = [*run_proof(request, tell)]
    else:
        reason = "no Python with vLLM is known here" if host else report.why_not("facts")
        parts = [GpuStep(step=name, state="not-run", reason=reason) for name in part_names()]
    said = visited.parts()
    proof = Proof(
        schema=SCHEMA,
        patchkit=__version__,
        date=date.today().isoformat(),
        device=gpu.name if gpu else "no GPU",
        capability=gpu.capability if gpu else "",
        driver=gpu.driver if gpu else "",
        vllm=software.vllm if software else "",
        torch=software.torch if software else "",
        model=Path(model).name or "random weights",
        parts=tuple(replace(part, lines=()) for part in parts),
        code=code,
        machines=said["nodes"],
        findings=said["findings"],
    )
    logs = {part.step: "\n".join(part.lines) for part in parts if part.lines}
    names = private_names((it.node, it.facts) for it in visited.reports)
    return pack_proof(proof, {**logs, "journal": said["journal"]}, names)


def check_free(reports: Sequence[NodeReport]) -> None:
    """Raise BusyError if a model is served on one of the nodes."""
    for report in reports:
        if report.state and report.state.left:
            why = "what is served takes the GPU and its memory: figures would be wrong"
            raise BusyError(f"{report.node}: {report.state.left}", why=why, hint="patchkit down")


def part_names() -> list[str]:
    """Return all parts in their order."""
    settings = proof_settings()
    names = [its.step for its in smoke_test().step]
    names += [f"kernel-{group}" for group in settings["kernels"]["groups"]]
    names += [f"routing-{name}" for name in settings["models"]]
    return [*names, *(f"nccl-{path}" for path in settings["nccl"]["paths"]), *_STARTS]


def run_proof(request: ProofRequest, tell: Tell) -> Iterator[GpuStep]:
    """Yield each part as soon as it is there. ``tell`` gets what is tried next."""
    settings, node = proof_settings(), request.nodes[0]
    steps = [asdict(its) for its in smoke_test().step]
    found = gpu_steps(node.python, steps, {**node.variables, **_QUIET})
    obstacle, done = "", set[str]()
    for step in steps:
        tell(f"{step['step']}: {step['seconds']} s at most")
        part = GpuStep(**next(found))
        done.add(part.step)
        if part.step == "gpu-device" and part.state != "ok":
            obstacle = part.reason
        yield part
    if obstacle:
        left = [name for name in part_names() if name not in done]
        yield from (GpuStep(step=name, state="not-run", reason=obstacle) for name in left)
        return
    with ScratchFolder() as place:
        folder = Path(place)
        tell(f"kernels: {settings['kernels']['seconds']} s at most, twice")
        yield from call_kernels(request, folder / "kernels")
        tell(f"routing: {settings['routing']['seconds']} s at most")
        yield from build_models(request)
        for path, variables in settings["nccl"]["paths"].items():
            tell(f"NCCL over {path}: {settings['nccl']['seconds']} s at most")
            yield time_path(request, f"nccl-{path}", variables)
        yield from measure_starts(request, folder, tell)


def call_kernels(request: ProofRequest, folder: Path) -> Iterator[GpuStep]:
    """Yield how each group's kernel was called with an empty cache, then with the one it left."""
    settings = proof_settings()["kernels"]
    caches = {f"kernel-{group}": folder / group for group in settings["groups"]}
    steps = [
        {"step": step, "script": "kernel", "group": cache.name, **settings}
        | {"variables": {"CUDA_CACHE_PATH": str(cache)}}
        for step, cache in caches.items()
    ]
    turns = [run_beside(request, steps) for _turn in ("empty", "kept")]
    for empty, kept in zip(*turns, strict=True):
        files = (file for file in caches[empty.step].rglob("*") if file.is_file())
        figures = {**empty.figures, "compiled_bytes": sum(file.stat().st_size for file in files)}
        if "first_s" in kept.figures:
            figures["first_kept_s"] = kept.figures["first_s"]
        worse = kept if empty.state == "ok" else empty
        yield replace(worse, figures=figures, seconds=round(empty.seconds + kept.seconds, 2))


def build_models(request: ProofRequest) -> Iterator[GpuStep]:
    """Yield which kernels vLLM chose for each format of weights."""
    settings = proof_settings()
    common = {"script": "routing", **settings["routing"]}
    common["variables"] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    steps = [
        {**common, "step": f"routing-{name}", "config": {**settings["base"], **own}}
        for name, own in settings["models"].items()
    ]
    for part in run_beside(request, steps):
        # One that stopped before it could answer told its log what it chose.
        told = dict.fromkeys(said[1] for line in part.lines for said in _CHOSE.finditer(line))
        yield part if part.kernel else replace(part, kernel=", ".join(told))


def run_beside(request: ProofRequest, steps: Sequence[dict[str, Any]]) -> list[GpuStep]:
    """Run steps of this room's script side by side, if there is memory for that."""
    node = request.nodes[0]

    def work(step: dict[str, Any]) -> GpuStep:
        variables = {**node.variables, **_QUIET, **step["variables"]}
        return run_step(node.python, {**step, "file": proof_script.__file__}, variables)

    beside = request.free_gib >= proof_settings()["beside_gib"]
    groups = [steps] if beside else [[step] for step in steps]
    found = [said for group in groups for said in everywhere(group, work)]
    return [said for said in found if isinstance(said, GpuStep)]


def time_path(request: ProofRequest, step: str, variables: Mapping[str, str]) -> GpuStep:
    """Return how long all nodes take to add up data of each size over one path."""
    try:
        if request.apart:
            raise HostError(request.apart)
        sizes = proof_settings()["nccl"]["sizes"]
        ranks = run_all_reduce(request.nodes, sizes, variables)
    except PatchkitError as error:
        return GpuStep(step=step, state="not-run", reason=error.what)
    wrong = [f"rank {number}: {it.reason}" for number, it in enumerate(ranks) if it.reason]
    # The slowest rank counts, since all wait for it.
    figures = {
        name: (max if name.startswith("micro") else min)(it.figures.get(name, own) for it in ranks)
        for name, own in ranks[0].figures.items()
    }
    return GpuStep(
        step=step,
        state="failed" if wrong else "ok",
        seconds=max(rank.seconds for rank in ranks),
        reason="; ".join(wrong),
        figures=figures,
        lines=tuple(line for rank in ranks for line in rank.lines),
    )


def measure_starts(request: ProofRequest, folder: Path, tell: Tell) -> Iterator[GpuStep]:
    """Serve a model with empty caches, then with those that were kept; measure both."""
    settings, obstacle = proof_settings(), ""
    if shutil.disk_usage(folder).free < settings["disk_gib"] * BYTES_PER_GIB:
        obstacle = f"less than {settings['disk_gib']} GiB are free in {folder.parent}"
    if not request.model and request.free_gib < settings["serve"]["gib"] + 8:
        obstacle = f"only {request.free_gib:.0f} GiB of memory are free"
    write_model(folder / "model", settings["serve"]["config"])
    for name in _STARTS:
        if obstacle:
            yield GpuStep(step=name, state="not-run", reason=obstacle)
            continue
        tell(f"{name}: {settings['serve']['seconds']} s at most")
        part = measure_start(request, folder, name)
        obstacle = f"the first start failed: {part.reason}" if part.state == "failed" else ""
        yield part


def write_model(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a model without weights, and a tokenizer for which each word is a token."""
    folder.mkdir()
    words = {f"w{number}": number for number in range(config["vocab_size"])}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w2"}
    texts = {"config": config, "tokenizer": tokenizer, "tokenizer_config": own}
    for name, value in texts.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")


def measure_start(request: ProofRequest, folder: Path, name: str) -> GpuStep:
    """Return how long a start took, tokens per second of one stream, and the cores in use."""
    settings, node = proof_settings()["serve"], request.nodes[0]
    model = request.model or str(folder / "model")
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    words = [node.python, *VLLM, "serve", model, "--host", "127.0.0.1", "--port", url[17:]]
    words += ["--served-model-name", "proof", *(() if request.model else settings["words"])]
    vllm = request.host.software.vllm if request.host.software else ""
    quiet = {**_QUIET, **({"HF_HUB_OFFLINE": "0"} if request.model else {})}
    env = {**os.environ, **node.variables, **quiet, **cache_variables(str(folder), vllm)}
    log, reason, begin = folder / f"{name}.log", "", time.monotonic()
    figures: dict[str, Any] = {}
    try:
        with hold_server([*words, *request.args], env, log) as server:
            wait_until_ready(server, url, begin + settings["seconds"])
            figures["ready_s"] = round(time.monotonic() - begin, 1)
            asked = PlannedVariant(name=name, python=node.python, url=url, tokenizer=model)
            figures |= measure_stream(asked, folder / f"{name}.bench", server.pid)
    except PatchkitError as error:
        reason = error.what
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else ()
    return GpuStep(
        step=name,
        state="failed" if reason else "ok",
        seconds=round(time.monotonic() - begin, 1),
        reason=reason,
        figures=figures,
        lines=tuple(lines[-_LOG:]),
    )


def measure_stream(asked: PlannedVariant, folder: Path, session: int) -> dict[str, float]:
    """Return what `vllm bench serve` says of one stream, and the cores that the server took.

    What it takes at rest is taken off for as long as the benchmark starts. Its first request, which
    warms the server up, is not in the benchmark's time.
    """
    settings = proof_settings()["serve"]
    load = BenchLoad(**settings["load"])
    its = {"folder": folder, "conditions": {}, "seconds": settings["seconds"]}
    plan = BenchPlan(model="proof", variants=[asked], loads=[load], rounds=1, **its)
    before, began = session_cpu(session), time.monotonic()
    measure_variants(plan, lambda _line: None)
    wall, used = time.monotonic() - began, session_cpu(session)
    time.sleep(_SPIN)
    at_rest = session_cpu(session)
    time.sleep(settings["idle"])
    later = session_cpu(session)
    said = read_json(dict[str, Any], read_text(result_file(folder, asked.name, load.name, 0)))
    figures = {name: said[key] for key, name in _FIGURES.items() if key in said}
    busy = said["duration"] * (load.prompts + 1) / load.prompts
    for name in before:
        rest = (later.get(name, 0.0) - at_rest.get(name, 0.0)) / settings["idle"]
        cores = (used.get(name, 0.0) - before[name] - rest * max(wall - busy, 0.0)) / busy
        for key, value in (("cores_busy", cores), ("cores_idle", rest), (f"cores {name}", cores)):
            figures[key] = figures.get(key, 0.0) + value
    return {name: round(value, 2) for name, value in figures.items()}


@contextlib.contextmanager
def hold_server(
    command: Sequence[str], env: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in a session of its own for a block; none of its processes outlives that."""
    server = None
    try:
        # An interrupt waits until it is known which process has to end.
        with deferred(), log.open("wb") as out:
            ends: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            server = subprocess.Popen(command, env=env, start_new_session=True, **ends)
        yield server
    finally:
        with deferred():
            for number in (signal.SIGTERM, signal.SIGKILL):
                if server is not None:
                    end_session(server, number)


def end_session(server: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a server's session, and wait for its end for some seconds."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, number)
    end = time.monotonic() + _GRACE
    while server.poll() is None or session_cpu(server.pid):
        if time.monotonic() > end:
            return
        time.sleep(0.1)


def wait_until_ready(server: subprocess.Popen[bytes], url: str, end: float) -> None:
    """Return once a server answers. Raises HostError if it ends, or does not until then."""
    while time.monotonic() < end:
        if server.poll() is not None:
            raise HostError(f"the server ended with {server.returncode}: see its log")
        if HttpServer(url).ask("/health", seconds=2).status == 200:
            return
        time.sleep(0.2)
    raise HostError("the server did not answer in time: see its log")


def session_cpu(session: int) -> dict[str, float]:
    """Return the seconds of CPU that the processes of a session took so far, by name."""
    tick = os.sysconf("SC_CLK_TCK")
    found: dict[str, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text(errors="replace").partition("(")[2].rpartition(")")
            numbers = rest.split()
            if int(numbers[3]) == session and numbers[0] != "Z":
                spent = (int(numbers[11]) + int(numbers[12])) / tick
                found[name] = found.get(name, 0.0) + spent
    return found
