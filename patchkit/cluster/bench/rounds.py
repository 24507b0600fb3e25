"""Measure variants in turns, and save each result in a file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from patchkit.cluster.bench.benchmark import BenchLoad, Benchmark, run_benchmark
from patchkit.cluster.bench.figures import CONDITIONS, result_file, result_files
from patchkit.cluster.bench.variants import PlannedVariant
from patchkit.cluster.launch.up import StartWatcher, serve_model
from patchkit.durable.atomic import replacing
from patchkit.errors import HostError, UsageError, translated
from patchkit.frozen import Fields, frozen
from patchkit.process import attempt

_FIND_VLLM = "import importlib.util as u; u.find_spec('vllm').name"


@frozen
class BenchPlan:
    """The variants and loads to measure, the number of rounds, and the folder for results."""

    model: str
    variants: Sequence[PlannedVariant]
    loads: Sequence[BenchLoad]
    rounds: int
    folder: Path
    conditions: Fields
    tokenizer: str = ""

    def turns(self) -> Iterator[tuple[int, PlannedVariant]]:
        """Yield the number of a round, from 0, with each variant in turn.

        The order is A B, B A, A B, so that a drift over time, such as heat, affects all alike.
        """
        for number in range(self.rounds):
            step = -1 if number % 2 else 1
            for variant in self.variants[::step]:
                yield number, variant


def measure_variants(
    plan: BenchPlan,
    watcher: StartWatcher,
    tell: Callable[[str], None],
) -> None:
    """Measure each load with each variant in every round; ``tell`` is called before each step.

    Raises HostError if a variant's Python has no vLLM or a benchmark fails, UsageError if the
    folder holds results already.
    """
    # Starting a server takes minutes: find a missing benchmark first.
    for python in {variant.python for variant in plan.variants}:
        _require_benchmark(python)

    _keep_conditions(plan)

    for number, variant in plan.turns():
        title = f"round {number + 1} of {plan.rounds}, {variant.name}"
        tell(f"{title}: the server starts" if variant.cluster else title)

        with _serve(variant, plan.model, watcher) as (url, model):
            for load in plan.loads:
                tell(f"{title}: {load.name}")
                # A cluster file may name the model as it likes: no tokenizer has that name.
                benchmark = Benchmark(
                    python=variant.python,
                    url=url,
                    model=model,
                    tokenizer=plan.tokenizer or variant.tokenizer or plan.model,
                    load=load,
                    seed=number,
                )
                place = result_file(plan.folder, variant.name, load.name, number)
                run_benchmark(benchmark, place)


@contextlib.contextmanager
def _serve(
    variant: PlannedVariant,
    model: str,
    watcher: StartWatcher,
) -> Iterator[tuple[str, str]]:
    """Serve a variant in the context; yield the server's URL, and the model's name there.

    A variant without a cluster has a server that runs already.
    """
    if variant.cluster is None:
        yield variant.url, model
        return

    with serve_model(variant.cluster, model, watcher) as units:
        yield units.url, units.model.name


def _require_benchmark(python: str) -> None:
    if attempt(python, "-c", _FIND_VLLM).trouble:
        raise HostError(
            f"{python}: vllm bench serve is not here",
            why="the benchmark is a part of vLLM",
            hint="name an environment on this machine that has vLLM: --venv DIR; "
            "it needs no GPU to ask a server elsewhere",
        )


def _keep_conditions(plan: BenchPlan) -> None:
    """Write the conditions into the folder. Raises UsageError if it holds results already."""
    if result_files(plan.folder):
        raise UsageError(
            f"{plan.folder}: holds results already", hint="name a new folder: -o DIR"
        )

    place = plan.folder / CONDITIONS
    with translated(at=place):
        plan.folder.mkdir(parents=True, exist_ok=True)
        with replacing(place) as file:
            text = json.dumps(plan.conditions, indent=1, sort_keys=True)
            file.write(f"{text}\n".encode())
