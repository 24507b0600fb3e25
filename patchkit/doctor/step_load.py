"""Put a load on a server, and measure its decoding steps meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import mean
from typing import Any

from patchkit.cluster.agent.judge import read_counters
from patchkit.cluster.openai.server_answers import read_figures
from patchkit.doctor.step_server import process_name, read_delays
from patchkit.errors import HostError
from patchkit.frozen import Values, frozen
from patchkit.http_exchange import HttpServer
from patchkit.runtime.host.machine_root import ToolUnavailable
from patchkit.runtime.host.probe import parse_rows, query_gpus

_POLL = 0.5  # seconds between two looks at the GPUs and the queue
_STEPS = "iteration_tokens_total_count"
_GPU = (
    "utilization.gpu",
    "clocks.sm",
    "clocks.max.sm",
    "power.draw",
    "temperature.gpu",
)


@frozen
class StepLoad:
    """So many requests at once, of so many ``tokens`` each.

    The load is measured for ``seconds`` after it has run for ``settle`` seconds.
    """

    requests: int
    prompt: str
    tokens: int
    seconds: float
    settle: float


@frozen
class LoadSample:
    """What a load showed. ``steps`` are decoding steps, ``tokens`` what they gave in ``seconds``.

    ``running``, ``waiting`` and ``kv_usage`` are means. ``process`` is the one that waited
    longest for a core, ``delay`` the part of the time that it waited. ``gpu`` are the means of
    nvidia-smi's columns, {} if it has none. ``accepted`` and ``drafted`` are for a draft.
    """

    seconds: float
    steps: float
    tokens: float
    running: float
    waiting: float
    kv_usage: float
    process: str
    delay: float | None
    gpu: Mapping[str, float]
    accepted: float | None = None
    drafted: float = 0.0


def run_load(
    server: HttpServer,
    model: str,
    load: StepLoad,
    pids: Sequence[int],
    gpus: Sequence[str],
) -> LoadSample:
    """Ask a model so many requests at once, and return what was seen meanwhile.

    ``pids`` are the engine's processes, ``gpus`` the indexes of its GPUs. Raises HostError if a
    request fails, or if the server counts no steps.
    """
    limit = load.settle + load.seconds
    pool = ThreadPoolExecutor(load.requests)
    try:
        answers = [
            pool.submit(_ask, server, model, load, number, limit)
            for number in range(load.requests)
        ]
        time.sleep(load.settle)
        sample = _observe(server, load.seconds, pids, gpus)
        troubles = list(filter(None, (answer.result() for answer in answers)))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)

    if sample is None:
        trouble = troubles[0] if troubles else "/metrics counts no steps meanwhile"
        raise HostError(
            f"{server.url}: {trouble}",
            hint="start the server without --disable-log-stats; `patchkit doctor`",
        )
    return sample


def _ask(
    server: HttpServer, model: str, load: StepLoad, number: int, seconds: float
) -> str:
    """Ask for tokens until the time is over; return why the server refused, "" if it did not."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        body = {
            "model": model,
            "prompt": load.prompt.format(number=number),
            "max_tokens": load.tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        # At the end the connection is cut, and the server drops the request.
        answer = server.ask("/v1/completions", body, left)
        if answer.status not in (0, 200):
            return server.clean(
                f"HTTP {answer.status} {answer.body[:200].decode(errors='replace')}"
            )
        if answer.status == 0 and answer.ms < left * 900:
            return answer.trouble
    return ""


def _observe(
    server: HttpServer, seconds: float, pids: Sequence[int], gpus: Sequence[str]
) -> LoadSample | None:
    """Return what is seen within ``seconds``, None if no step is counted."""
    former_text = server.ask("/metrics").text
    former_delays = read_delays(pids)
    began = time.monotonic()

    gauges: list[dict[str, float]] = []
    cards: list[dict[str, float]] = []
    while time.monotonic() - began < seconds - _POLL:
        time.sleep(_POLL)
        gauges.append(read_figures(server.ask("/metrics").text))
        with contextlib.suppress(ToolUnavailable):
            cards += _read_cards(gpus)

    elapsed = time.monotonic() - began
    delays = read_delays(pids)
    text = server.ask("/metrics").text
    elapsed_metrics = time.monotonic() - began

    steps = _count(text, _STEPS) - _count(former_text, _STEPS)
    figures = read_figures(text)
    former = read_figures(former_text)
    moved = {name: figures[name] - former.get(name, 0.0) for name in figures}
    if steps <= 0 or moved.get("generated", 0.0) <= 0 or not gauges:
        return None

    process, delay = _most_delayed(former_delays, delays, elapsed)
    drafted = moved.get("drafted", 0.0)
    return LoadSample(
        seconds=elapsed_metrics,
        steps=steps,
        tokens=moved["generated"],
        running=_mean(gauges, "running"),
        waiting=_mean(gauges, "waiting"),
        kv_usage=_mean(gauges, "kv-usage"),
        process=process,
        delay=delay,
        gpu={name: _mean(cards, name) for name in _GPU} if cards else {},
        accepted=moved.get("accepted", 0.0) / drafted if drafted > 0 else None,
        drafted=drafted / max(moved.get("drafts", 0.0), 1.0),
    )


def _count(text: str, name: str) -> float:
    return read_counters(text).steps.get(name, 0.0)


def _mean(rows: Iterable[Mapping[str, float]], name: str) -> float:
    values = [row[name] for row in rows if name in row]
    return mean(values) if values else 0.0


def _most_delayed(
    former: Mapping[int, float], now: Mapping[int, float], seconds: float
) -> tuple[str, float | None]:
    """Return the process that waited longest for a core, and the part of the time."""
    delays = {pid: now[pid] - former[pid] for pid in now.keys() & former}
    if not delays:
        return "", None
    most = max(delays, key=lambda pid: delays[pid])
    return process_name(most), delays[most] / seconds


def _read_cards(gpus: Sequence[str]) -> list[dict[str, float]]:
    """Return what nvidia-smi says of the GPUs; a figure that it does not have is left out."""
    text = query_gpus(f"--query-gpu=index,{','.join(_GPU)}")
    cards = []
    for index, *cells in parse_rows(text, len(_GPU) + 1):
        if index in gpus or not gpus:
            pairs = zip(_GPU, cells, strict=True)
            cards.append(dict(_numbers(dict(pairs))))
    return cards


def _numbers(cells: Values) -> Iterable[tuple[str, Any]]:
    for name, cell in cells.items():
        with contextlib.suppress(ValueError):
            yield name, float(cell)
