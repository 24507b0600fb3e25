"""Measure variants in turns; what was measured is kept, so that an interrupted run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchkit.cluster.launch.up import StartWatcher, serve_model
from patchkit.doctor.proof import Stream
from patchkit.doctor.symptoms.findings import explain_failed_start
from patchkit.durable.atomic import replacing
from patchkit.errors import HostError, StorageError, UsageError, translated
from patchkit.measure.figures import (
    CONDITIONS,
    find_changes,
    read_conditions,
    result_file,
)
from patchkit.measure.variants import BenchLoad, PlannedVariant
from patchkit.process import attempt, run
from patchkit.quoting import quoted
from patchkit.reading import read_text
from patchkit.records import RecordError, read_json
from patchkit.runtime.python.startup import VLLM

_LONGEST_MEASUREMENT = 3600.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What is measured, how often, and where it is kept; a load may take ``seconds``."""

    model: str
    variants: Sequence[PlannedVariant]
    loads: Sequence[BenchLoad]
    rounds: int
    folder: Path
    conditions: dict[str, Any]
    tokenizer: str = ""
    seconds: float = _LONGEST_MEASUREMENT

    def left(self) -> Iterator[tuple[int, PlannedVariant, list[BenchLoad]]]:
        """Yield each round's number and variant, in turns, with the loads not measured yet.

        The order is A B, B A, A B: whatever drifts with time, such as heat, falls on all alike.
        """
        for number in range(self.rounds):
            for variant in (
                self.variants if number % 2 == 0 else reversed(self.variants)
            ):
                loads = [
                    load
                    for load in self.loads
                    if not result_file(
                        self.folder, variant.name, load.name, number
                    ).exists()
                ]
                if loads:
                    yield number, variant, loads


def measure_variants(plan: BenchPlan, tell: Callable[[str], None]) -> None:
    """Measure what is not measured yet. ``tell`` gets each step.

    Raises HostError without `vllm bench serve`, UsageError if the folder holds figures of another
    setup.
    """
    for python in {
        variant.python for variant in plan.variants
    }:  # before a server is started
        look = "import importlib.util as u; u.find_spec('vllm').name"
        if attempt(python, "-c", look).trouble:
            raise HostError(
                f"{python}: vllm bench serve is not here",
                why="the benchmark is a part of vLLM",
                hint="name an environment on this machine that has vLLM: --venv DIR; "
                "it needs no GPU to ask a server elsewhere",
            )
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
    elif plan.folder.exists() and any(plan.folder.iterdir()):
        raise UsageError(
            f"{plan.folder}: is there, and holds no results", hint="-o DIR"
        )
    else:
        with translated(at=place):
            plan.folder.mkdir(parents=True, exist_ok=True)
            with replacing(place) as file:
                said = json.dumps(plan.conditions, indent=1, sort_keys=True)
                file.write(f"{said}\n".encode())
    watcher = StartWatcher(
        lambda *_: None, explain_failed_start, lambda _text: None, lambda _text: None
    )
    for number, variant, loads in plan.left():
        title = f"round {number + 1} of {plan.rounds}, {variant.name}"
        tell(f"{title}: the server starts" if not variant.url else title)
        with ExitStack() as stack:
            url, model = variant.url, plan.model
            if variant.cluster:
                units = stack.enter_context(
                    serve_model(variant.cluster, model, watcher)
                )
                url, model = units.url, units.model.name
            for load in loads:
                tell(f"{title}: {load.name}")
                _measure_load(plan, variant, load, number, url, model)


def measure_stream(stream: Stream) -> dict[str, Any]:
    """Return what `vllm bench serve` says of one stream of a server that runs."""
    server = PlannedVariant(
        name=stream.name,
        python=stream.python,
        url=stream.url,
        tokenizer=stream.tokenizer,
    )
    load = BenchLoad(**stream.load)
    plan = BenchPlan(
        model="proof",
        variants=[server],
        loads=[load],
        rounds=1,
        folder=stream.folder,
        conditions={},
        seconds=stream.seconds,
    )
    measure_variants(plan, lambda _line: None)
    return read_json(
        dict[str, Any], read_text(result_file(stream.folder, server.name, load.name, 0))
    )


def _measure_load(
    plan: BenchPlan,
    variant: PlannedVariant,
    load: BenchLoad,
    number: int,
    url: str,
    model: str,
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
        *(
            "--random-output-len",
            str(load.output),
            "--ignore-eos",
            "--seed",
            str(number),
        ),
        *(
            "--num-prompts",
            str(load.prompts),
            "--max-concurrency",
            str(load.concurrency),
        ),
        *("--num-warmups", str(load.concurrency)),
        *(
            "--percentile-metrics",
            "ttft,tpot,itl,e2el",
            "--metric-percentiles",
            "50,90,99",
        ),
        *("--disable-tqdm", "--save-result", "--result-dir", str(place.parent)),
        *("--result-filename", part.name),
        timeout=plan.seconds,
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
