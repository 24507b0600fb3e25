"""Measure variants in turns; what was measured is kept, so that an interrupted run goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchkit.cluster.launch.up import StartWatcher, hold_model
from patchkit.cluster.openai.http_exchange import HttpServer
from patchkit.doctor.symptoms.findings import explain_failed_start
from patchkit.durable.atomic import replacing
from patchkit.durable.failure import translated
from patchkit.errors import HostError, StorageError, UsageError
from patchkit.measure.figures import CONDITIONS, find_changes, read_conditions, result_file
from patchkit.measure.variants import VLLM, BenchLoad, PlannedVariant
from patchkit.process import attempt, run
from patchkit.quoting import quoted
from patchkit.reading import read_text
from patchkit.records import RecordError, read_json
from patchkit.runtime.rules.secret_texts import mask_secrets

_LONGEST_START = 1800.0  # seconds
_LONGEST_MEASUREMENT = 3600.0
_END = 30.0  # seconds for a server to end by itself
# Told to every server: nothing is reported to anybody, and no line of the log is held back.
_QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What is measured, how often, and where it is kept."""

    model: str
    variants: Sequence[PlannedVariant]
    loads: Sequence[BenchLoad]
    rounds: int
    folder: Path
    conditions: dict[str, Any]
    tokenizer: str = ""

    def left(self) -> Iterator[tuple[int, PlannedVariant, list[BenchLoad]]]:
        """Yield each round's number and variant, in turns, with the loads not measured yet.

        The order is A B, B A, A B: whatever drifts with time, such as heat, falls on all alike.
        """
        for number in range(self.rounds):
            for variant in self.variants if number % 2 == 0 else reversed(self.variants):
                loads = [
                    load
                    for load in self.loads
                    if not result_file(self.folder, variant.name, load.name, number).exists()
                ]
                if loads:
                    yield number, variant, loads


def measure_variants(plan: BenchPlan, tell: Callable[[str], None]) -> None:
    """Measure what is not measured yet. ``tell`` gets each step.

    Raises HostError without `vllm bench serve`, UsageError if the folder holds figures of another
    setup.
    """
    for python in {variant.python for variant in plan.variants}:  # before a server is started
        _require_vllm(python)
    _write_conditions(plan)
    for number, variant, loads in plan.left():
        title = f"round {number + 1} of {plan.rounds}, {variant.name}"
        tell(f"{title}: the server starts" if not variant.url else title)
        with _serve_variant(plan, variant, number) as (url, model):
            for load in loads:
                tell(f"{title}: {load.name}")
                _measure_load(plan, variant, load, number, url, model)


def _require_vllm(python: str) -> None:
    if attempt(python, "-c", "import importlib.util as u; u.find_spec('vllm').name").trouble:
        raise HostError(
            f"{python}: vllm bench serve is not here",
            why="the benchmark is a part of vLLM",
            hint="name an environment on this machine that has vLLM: --venv DIR; "
            "it needs no GPU to ask a server elsewhere",
        )


def _write_conditions(plan: BenchPlan) -> None:
    """Write what makes the figures, or see that the file that is there says the same."""
    place = plan.folder / CONDITIONS
    if place.exists():
        if changes := find_changes(read_conditions(plan.folder), plan.conditions):
            name, old, new = changes[0]
            raise UsageError(
                f"{plan.folder} holds figures of another setup: {name} was {old!r}, is {new!r}",
                why="figures of two setups in one folder would be compared as if they were one's",
                hint="name a new folder: -o DIR; then compare: "
                + quoted("patchkit", "bench", "diff", plan.folder, "DIR"),
            )
        return
    if plan.folder.exists() and any(plan.folder.iterdir()):
        raise UsageError(f"{plan.folder}: is there, and holds no results", hint="-o DIR")
    with translated(at=place):
        plan.folder.mkdir(parents=True, exist_ok=True)
        with replacing(place) as file:
            file.write((json.dumps(plan.conditions, indent=1, sort_keys=True) + "\n").encode())


@contextmanager
def _serve_variant(
    plan: BenchPlan, variant: PlannedVariant, number: int
) -> Iterator[tuple[str, str]]:
    """Serve a variant, and yield where and under which name; what runs at a URL stays."""
    if variant.url:
        yield variant.url, plan.model
    elif variant.cluster:
        watcher = StartWatcher(lambda *_: None, explain_failed_start)
        with hold_model(variant.cluster, plan.model, watcher) as begun:
            yield begun.plan.units.url, begun.plan.units.model.name
    else:
        log = plan.folder / "log" / f"{variant.name}-{number + 1}.log"
        with serve_here(variant, log) as served:
            yield served


@contextmanager
def serve_here(
    variant: PlannedVariant, log: Path, patience: float = _LONGEST_START
) -> Iterator[tuple[str, str]]:
    """Start a server on a free port of this machine alone, and end all its processes.

    Raises HostError that names its log if it does not answer within ``patience`` seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch(mode=0o600)  # vLLM writes its arguments, keys among them; they are masked at the end
    with log.open("w") as file:
        try:
            process = subprocess.Popen(
                [*variant.words, "--host", "127.0.0.1", "--port", str(port)],
                env={**os.environ, **_QUIET, **variant.variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # a group of its own, which ends as a whole
            )
        except OSError as error:
            raise HostError(f"{variant.words[0]}: {error.strerror}", hint="--venv DIR") from None
    try:
        url = f"http://127.0.0.1:{port}"
        yield url, _wait_for_model(process, url, log, patience)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.write_text(mask_secrets(log.read_text(errors="replace")))


def _wait_for_model(process: subprocess.Popen[bytes], url: str, log: Path, patience: float) -> str:
    server, until = HttpServer(url), time.monotonic() + patience
    trouble = f"the server did not answer within {patience:.0f} s"
    while time.monotonic() < until:
        if (status := process.poll()) is not None:
            trouble = f"the server ended with exit code {status}"
            break
        listing = server.ask("/v1/models")
        if listing.status == 200:
            return str(listing.json["data"][0]["id"])
        time.sleep(1)
    raise HostError(trouble, hint=quoted("patchkit", "doctor", "--log", log))


def _measure_load(
    plan: BenchPlan, variant: PlannedVariant, load: BenchLoad, number: int, url: str, model: str
) -> None:
    """Write the result of one load, whole or not at all.

    Before it counts, as many requests as it will have at a time warm the server up. Prompts are
    drawn by the round: one that was asked before would be answered from the prefix cache. Raises
    HostError if the benchmark fails, or if not every request was answered.
    """
    place = result_file(plan.folder, variant.name, load.name, number)
    part = place.with_suffix(".part")
    place.parent.mkdir(parents=True, exist_ok=True)
    own = plan.model if model != plan.model else ""
    tokenizer = plan.tokenizer or variant.tokenizer or own
    run(
        *(variant.python, *VLLM, "bench", "serve"),
        *("--backend", "openai", "--base-url", url, "--model", model),
        *(("--tokenizer", tokenizer) if tokenizer else ()),
        *("--dataset-name", "random", "--random-input-len", str(load.depth)),
        *("--random-output-len", str(load.output), "--ignore-eos", "--seed", str(number)),
        *("--num-prompts", str(load.prompts), "--max-concurrency", str(load.concurrency)),
        *("--num-warmups", str(load.concurrency)),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"),
        *("--disable-tqdm", "--save-result", "--result-dir", str(place.parent)),
        *("--result-filename", part.name),
        timeout=_LONGEST_MEASUREMENT,
        why="it needs the model's tokenizer",
        hint="--tokenizer DIR names the tokenizer of a model that is not on this machine",
    )
    try:
        completed = read_json(dict[str, object], read_text(part)).get("completed")
    except RecordError as error:
        raise StorageError(f"{part}: no result of the benchmark: {error}") from None
    if completed != load.prompts:
        raise HostError(
            f"{completed} of {load.prompts} requests were answered",
            why="the server refused or broke the others: a prompt too long, or an engine that died",
            hint="patchkit doctor",
        )
    part.replace(place)
