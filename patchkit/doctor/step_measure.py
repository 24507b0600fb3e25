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
from patchkit.cluster.openai.server_answers import find_server, read_figures
from patchkit.cluster.ssh.answer import encoded
from patchkit.cluster.ssh.ssh import HERE
from patchkit.doctor.gpu import GpuNode, run_all_reduce, slowest_figures
from patchkit.doctor.gpu_steps import run_step
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
from patchkit.frozen import Fields, Values, frozen
from patchkit.http_exchange import HttpServer
from patchkit.reading import read_text
from patchkit.records import RECIPES, RecordError, read_json, read_toml
from patchkit.runtime.host.probe import ToolUnavailable, parse_rows, query_gpus

_LOAD = read_toml(Fields, RECIPES / "bench.toml", key="load")
_POLL = 0.5  # seconds between two looks at the GPUs and the metrics
_NEEDED = {"steps", "generated", "running", "kv-usage"}  # of a look that counts


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

    found = find_server(request.url, cluster.name)
    started = found.started
    process = find_server_process(found.server.url)
    lines = log_lines(request.log, process, cluster if started else None)
    # `up` adds flags by its rules: only those of cluster.toml are a user's.
    chosen = cluster.serve.args if started else process.words
    listing = found.server.ask("/v1/models")
    name = str(listing.value("data", 0, "id"))
    folder = started.get("folder") or listing.value("data", 0, "root")
    measured = {
        **read_setup(process, chosen, lines),
        **read_model(request.model, str(folder), process.variables),
        **_measure_load(request, found.server, name, process),
    }
    measured |= _graph_facts(measured)

    python = request.python or process.words[0]
    planned = tuple(map(positive_number, started.get("speed", (0, 0, 0))))
    measured |= _measure_memory(python, process, measured, planned)
    if measured["ranks"] == 1:
        measured |= _LOAD["alone"]
    elif started and len(cluster.nodes) > 1:
        measured |= _LOAD["several"]
    else:
        measured |= _measure_all_reduce(python, process.variables, measured)
    return explain_step(measured)


def keep_step(explained: StepParts, folder: Path) -> None:
    """Write why.json into a folder, and as the newest record of this machine, for `proof`."""
    for place in (folder, share_folder("bench")):
        place.mkdir(parents=True, exist_ok=True)
        with replacing(place / "why.json") as file:
            file.write(encoded(explained).encode())


def read_step() -> Fields:
    """Return the newest record of this machine as values for JSON, {} if there is none."""
    with contextlib.suppress(PatchkitError, RecordError, OSError):
        path = share_folder("bench") / "why.json"
        return read_json(Fields, read_text(path, follow=False))
    return {}


def _measure_load(
    request: StepRequest, server: HttpServer, model: str, process: ServerProcess
) -> Fields:
    """Ask for tokens, so many requests at once, and return what is seen meanwhile."""
    settle = _LOAD["settle"]
    end = time.monotonic() + settle + request.seconds
    # The load goes on a little longer, so that the last look is under it as well.
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

    # A busy server may leave out an answer.
    rows = [row for row in rows if row.keys() >= _NEEDED] or [
        dict.fromkeys(_NEEDED, 0.0)
    ]
    last = rows[-1]
    moved = {name: last[name] - rows[0].get(name, 0.0) for name in last}
    if moved["steps"] <= 0:
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
    with contextlib.suppress(ToolUnavailable, ValueError):
        rows = parse_rows(query_gpus(*options), len(columns))
        cells = zip(columns, *rows, strict=True)
        figures |= {name: mean(map(float, row)) for name, *row in cells if all(row)}
    return figures


def _rates(moved: Fields, means: Fields, process: ServerProcess) -> Fields:
    """Return quantities of a step, and shares of the time."""
    seconds = moved["time"]
    drafted = moved.get("drafted", 0.0)
    drafts = max(moved.get("drafts", 0.0), 1.0)
    # A process that ended meanwhile has no delay.
    delays = {name: moved.get(name, 0.0) / seconds for name in process.engines.values()}
    most = max(delays, key=delays.__getitem__)
    # A delay is no idle time where it is known: the GPU may still work on the former step.
    busy = means.get("busy", 100 * (1 - delays[most]))
    return {
        "step_ms": seconds / moved["steps"] * 1000,
        "tokens": moved["generated"] / moved["steps"],
        "speed": moved["generated"] / seconds,
        "accepted": moved.get("accepted", drafted) / drafted if drafted else None,
        "drafted": drafted / drafts,
        "process": most,
        "delay": delays[most],
        "host": 1 - busy / 100,
    }


def _graph_facts(measured: Fields) -> Fields:
    """Return the tokens of a step, and the size of the CUDA graph that they get."""
    # A drafted token needs as much as another.
    batch = max(round(measured["running"] * (1 + round(measured["drafted"]))), 1)
    sizes = list(map(int, re.findall(r"\d+", measured.get("graph_sizes", ""))))
    graph = min(
        (size for size in sizes if size >= batch), default=max(sizes, default=0)
    )
    return {
        "batch": batch,
        "graph": graph,
        "graph_ratio": graph / batch or None,
    }


def _measure_memory(
    python: str, process: ServerProcess, measured: Fields, planned: Sequence[float]
) -> Fields:
    """Measure bandwidth and a short kernel beside the idle server.

    ``planned`` are the bytes of weights and cache, and the device's bytes per second, 0 if unknown.
    """
    weights = planned[0] or measured["reads"] / measured["ranks"]
    settings = {
        **_LOAD["decode"],
        "hidden": measured["hidden"],
        "tokens": measured["batch"],
    }
    step = run_step(python, settings, process.variables)
    rate = positive_number(step.figures.get("gigabytes_per_second"))
    bandwidth = rate or planned[2] / 1e9
    return {
        "read_gb": (weights + planned[1] * measured["kv-usage"]) / 1e9 or None,
        "bandwidth": bandwidth or None,
        "ms_per_gb": 1000 / bandwidth if bandwidth else None,
        "layer_kernels": settings["layer_kernels"],
        "kernel_ms": step.figures.get("kernel_milliseconds"),
        "gpu": step.reason or "measured",
    }


def _measure_all_reduce(python: str, variables: Values, measured: Fields) -> Fields:
    """Measure an all-reduce of this model's size over the GPUs that the server sees."""
    nodes = [
        GpuNode(
            node=HERE,
            python=python,
            address="127.0.0.1",
            variables={**variables, "CUDA_VISIBLE_DEVICES": device},
        )
        for device in variables.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    ]
    # A vector in 16 bits for each token of a step; behind attention, and behind the MLP.
    size = 2 * measured["batch"] * measured["hidden"]
    results = run_all_reduce(nodes, {**_LOAD["all-reduce"], "sizes": [size]})
    figure = slowest_figures(results).get(f"microseconds_in_a_graph_{size}")
    reasons = [result.reason for result in results]
    return {
        "reductions": 2 * (measured["layers"] or 0) or None,
        "reduction_ms": figure / 1000 if figure else None,
        "nccl": max(reasons) or f"2 a layer, of {size} bytes, by NCCL alone",
        **read_log(chain.from_iterable(result.lines for result in results)),
    }
