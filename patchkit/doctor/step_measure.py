"""Measure a decoding step of a server on this machine under a load, and explain it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from statistics import mean

from patchkit.cluster.agent.installation import share_folder
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.start_plan import make_plan
from patchkit.cluster.openai.server_answers import find_server, read_figures
from patchkit.cluster.ssh.answer import encoded
from patchkit.cluster.ssh.ssh import HERE
from patchkit.doctor.gpu import GpuNode, run_all_reduce, slowest_figures
from patchkit.doctor.gpu_steps import GpuStep, run_step
from patchkit.doctor.step_parts import StepParts, explain_step
from patchkit.doctor.step_server import (
    ServerProcess,
    find_server_process,
    log_lines,
    read_log,
    read_model,
    read_setup,
)
from patchkit.durable.atomic import replacing
from patchkit.errors import HostError, PatchkitError
from patchkit.foreign import positive_number
from patchkit.frozen import Fields, frozen
from patchkit.http_exchange import HttpServer
from patchkit.reading import read_text
from patchkit.records import RECIPES, RecordError, read_json, read_toml
from patchkit.runtime.host.machine_root import ToolUnavailable
from patchkit.runtime.host.probe import parse_rows, query_gpus
from patchkit.units import BYTES_PER_GIB

_LOAD = read_toml(Fields, RECIPES / "bench.toml", key="load")
_POLL = 0.5  # seconds between two looks at the GPUs and the metrics


@frozen
class StepRequest:
    """What to explain: the server at ``url``, "" for that of the cluster, under ``requests``.

    ``log`` is the file that the server wrote, None to find it; ``python`` runs the GPU's part, ""
    for the server's own. ``seconds`` are for the load.
    """

    cluster: Cluster
    model: str
    url: str
    requests: int
    log: Path | None
    python: str
    seconds: float


def explain_server(request: StepRequest) -> StepParts:
    """Measure a server under a load and, when it is idle again, its GPU; explain its step.

    Raises HostError if the server is not on this machine, is another user's, or fails.
    """
    cluster = request.cluster
    if not request.url and not cluster.head.here:
        raise HostError(
            f"{cluster.head.destination} is not this machine",
            hint="run it on the first node of cluster.toml",
        )

    place = find_server(request.url, cluster.name)
    started = place.started
    listing = place.server.ask("/v1/models")
    name = listing.value("data", 0, "id")
    if not isinstance(name, str):
        raise HostError(
            f"{place.server.url} does not answer, or serves no model",
            hint=f"patchkit up {request.model}",
        )

    process = find_server_process(place.server.url)
    lines = log_lines(request.log, process, cluster if started else None)
    # `up` adds flags by its rules: only those of cluster.toml are a user's.
    chosen = cluster.serve.args if started else process.words
    folder = started.get("folder") or listing.value("data", 0, "root")
    measured = {
        **_LOAD["alone"],
        **read_setup(process, chosen, lines),
        **read_model(request.model, str(folder), process.variables),
        **_measure_load(request, place.server, name, process),
    }
    measured |= _graph_facts(measured)

    python = request.python or process.words[0]
    planned = tuple(map(positive_number, started.get("speed", (0, 0, 0))))
    measured |= _measure_memory(python, process, measured, planned)
    if measured["ranks"] > 1:
        nodes = _local_nodes(python, process)
        if started and len(cluster.nodes) > 1:
            nodes = _cluster_nodes(python, request)
        measured |= _measure_all_reduce(nodes, measured)
    return explain_step(measured)


def keep_step(explained: StepParts, folder: Path) -> None:
    """Write why.json into a folder, and as the newest record of this machine, for `proof`."""
    for path in (folder / "why.json", _record_path()):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(encoded(explained).encode())


def read_step() -> Fields:
    """Return the newest record of this machine as values for JSON, {} if there is none."""
    with contextlib.suppress(PatchkitError, RecordError, OSError):
        return read_json(Fields, read_text(_record_path(), follow=False))
    return {}


def _record_path() -> Path:
    return share_folder("bench") / "why.json"


def _measure_load(
    request: StepRequest, server: HttpServer, model: str, process: ServerProcess
) -> Fields:
    """Ask for tokens, so many requests at once, and return what is seen meanwhile."""
    settle = _LOAD["settle"]
    end = time.monotonic() + settle + request.seconds
    with ThreadPoolExecutor(request.requests) as pool:
        answers = [
            pool.submit(_ask, server, model, number, end + settle)
            for number in range(request.requests)
        ]
        time.sleep(settle)
        rows = [_look(server, process)]
        while time.monotonic() < end:
            time.sleep(_POLL)
            rows.append(_look(server, process))
        for answer in answers:
            answer.result()

    last = rows[-1]
    moved = {name: last[name] - rows[0].get(name, 0.0) for name in last}
    if moved.get("steps", 0.0) <= 0:
        raise HostError(
            f"{server.url}: /metrics counts no steps meanwhile",
            hint="start the server without --disable-log-stats; `patchkit doctor`",
        )
    means = {name: mean(row[name] for row in rows if name in row) for name in last}
    return {**means, **_rates(moved, means, process)}


def _ask(server: HttpServer, model: str, number: int, end: float) -> None:
    """Ask for tokens until the time is over. Raises HostError if the server refuses."""
    prompt = f"{number}. {_LOAD['prompt']}"
    body = {**_LOAD["body"], "model": model, "prompt": prompt}
    while (left := end - time.monotonic()) > 0:
        # At the end the connection is cut, and the server drops the request.
        answer = server.ask("/v1/completions", body, left)
        if answer.status != 200 and time.monotonic() < end:
            words = answer.trouble or answer.body.decode(errors="replace")
            raise HostError(
                f"{server.url}: HTTP {answer.status}: {server.clean(words)}",
                hint="patchkit doctor",
            )


def _look(server: HttpServer, process: ServerProcess) -> dict[str, float]:
    """Return the figures of GPUs, of waits for a core and of /metrics, with the time."""
    metrics = read_figures(server.ask("/metrics").text)
    figures = {**metrics, "time": time.monotonic(), **process.read_delays()}

    columns = _LOAD["gpu"]
    options = [f"--query-gpu={','.join(columns.values())}"]
    if visible := process.variables.get("CUDA_VISIBLE_DEVICES"):
        options.append(f"--id={visible}")
    with contextlib.suppress(ToolUnavailable):
        rows = parse_rows(query_gpus(*options), len(columns))
        for name, *cells in zip(columns, *rows, strict=True):
            with contextlib.suppress(ValueError):  # the GPU does not say it
                figures[name] = mean(map(float, cells))
    return figures


def _rates(moved: Fields, means: Fields, process: ServerProcess) -> Fields:
    """Return quantities of a step, and shares of the time."""
    seconds = moved["time"]
    drafted = moved.get("drafted", 0.0)
    delays = {name: moved[name] / seconds for name in process.engines.values()}
    most = max(delays, key=lambda name: delays[name])
    return {
        "step_ms": seconds / moved["steps"] * 1000,
        "tokens": moved["generated"] / moved["steps"],
        "speed": moved["generated"] / seconds,
        "accepted": moved["accepted"] / drafted if drafted else None,
        "drafted": drafted / moved["drafts"] if drafted else 0.0,
        "process": most,
        "delay": delays[most],
        # A GPU that waits for a delayed engine is idle: the delay is a part of that time.
        "host": max(1 - means.get("busy", 100) / 100, delays[most]),
    }


def _graph_facts(measured: Fields) -> Fields:
    """Return the tokens of a step, and the size of the CUDA graph that they get."""
    # A drafted token needs as much as another.
    batch = max(round(measured["running"] * (1 + round(measured["drafted"]))), 1)
    sizes = sorted(map(int, re.findall(r"\d+", measured.get("graph_sizes", ""))))
    graph = next((size for size in sizes if size >= batch), max(sizes, default=0))
    return {
        "batch": float(batch),
        "graph": float(graph),
        "graph_ratio": graph / batch or None,
    }


def _measure_memory(
    python: str, process: ServerProcess, measured: Fields, planned: Sequence[float]
) -> Fields:
    """Measure bandwidth and kernels beside the idle server.

    ``planned`` are the bytes of weights and cache, and the device's bytes per second, 0 if unknown.
    """
    weights = planned[0] or float(measured.get("weights_gib", 0)) * BYTES_PER_GIB
    layers = measured["layers"]
    step = GpuStep(step="decode", state="not-run", reason="the shape is not known")
    if weights and layers:
        settings = {
            **_LOAD["decode"],
            "hidden": int(measured["hidden"]),
            "layer_bytes": int(weights / layers),
            "tokens": int(measured["batch"]),
        }
        step = run_step(python, settings, process.variables)

    rate = positive_number(step.figures.get("gigabytes_per_second"))
    bandwidth = rate or planned[2] / 1e9
    return {
        "read_gb": (weights + planned[1] * measured["kv-usage"]) / 1e9 or None,
        "bandwidth": bandwidth,
        "ms_per_gb": 1000 / bandwidth if bandwidth else None,
        "kernel_ms": step.figures.get("kernel_milliseconds"),
        "gpu": step.reason or "measured",
    }


def _cluster_nodes(python: str, request: StepRequest) -> list[GpuNode]:
    """Return where the ranks of the server that `up` started run, with their variables."""
    planned = make_plan(request.cluster, request.model).units.ranks
    return [
        GpuNode(
            node=node.destination,
            python=python,
            address=rank.address,
            variables={item.name: item.value for item in rank.env.settings},
        )
        for node, rank in zip(request.cluster.nodes, planned, strict=True)
    ]


def _local_nodes(python: str, process: ServerProcess) -> list[GpuNode]:
    """Return a rank for each GPU of this machine that the server sees."""
    visible = process.variables.get("CUDA_VISIBLE_DEVICES", "0,1")
    return [
        GpuNode(
            node=HERE,
            python=python,
            address="127.0.0.1",
            variables={**process.variables, "CUDA_VISIBLE_DEVICES": device},
        )
        for device in visible.split(",")
    ]


def _measure_all_reduce(nodes: Sequence[GpuNode], measured: Fields) -> Fields:
    """Measure an all-reduce of this model's size over all ranks, with their variables."""
    # A vector in 16 bits for each token of a step; behind attention, and behind the MLP.
    size = int(2 * measured["batch"] * measured["hidden"])
    results = run_all_reduce(nodes, {**_LOAD["all-reduce"], "sizes": [size]})
    figure = slowest_figures(results).get(f"microseconds_in_a_row_{size}")
    reasons = [result.reason for result in results]
    return {
        "reductions": 2 * measured["layers"],
        "reduction_ms": figure / 1000 if figure else None,
        "nccl": max(reasons) or f"2 a layer, of {size} bytes, by NCCL alone",
        **read_log(chain.from_iterable(result.lines for result in results)),
    }
