"""Measure variants in turns; what was measured is kept, so that an interrupted run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchkit.cluster.launch.hold import held
from patchkit.doctor.report.redaction import Redactor
from patchkit.durable.atomic import replacing
from patchkit.durable.failure import translated
from patchkit.errors import UsageError
from patchkit.measure.bench.difference import changed
from patchkit.measure.bench.measure import TOOLS, VLLM, BenchClient, measure
from patchkit.measure.bench.planned import PlannedVariant
from patchkit.measure.bench.results import DIGEST, digest_of, place_of, series
from patchkit.measure.bench.served import served
from patchkit.measure.bench.summary import csv_text, markdown
from patchkit.measure.bench.variants import BenchLoad, Variant, turns
from patchkit.quoting import quoted
from patchkit.reading import read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What is measured, how often, and where it is kept; ``patience`` is for a start, in seconds.

    With ``url`` a server that runs already is measured, as the first variant. ``tool`` is one of
    TOOLS.
    """

    model: str
    variants: Sequence[PlannedVariant]
    loads: Sequence[BenchLoad]
    rounds: int
    folder: Path
    digest: dict[str, Any]
    redactor: Redactor
    tokenizer: str = ""
    url: str = ""
    tool: str = VLLM
    patience: float = 1800.0


def bench(plan: BenchPlan, tell: Callable[[str], None]) -> None:
    """Measure what is not measured yet, then write the summary. ``tell`` gets each step.

    Raises HostError without the tool, UsageError if the folder holds figures of another setup.
    """
    for each in plan.variants:
        TOOLS[plan.tool].program(each.python)  # before a server is started
    _begin(plan)
    by_name = {each.variant.name: each for each in plan.variants}
    for number, variant, left in rounds_left(plan):
        _round(plan, by_name[variant.name], number, left, tell)
    summarise(plan.folder)


def rounds_left(plan: BenchPlan) -> Iterator[tuple[int, Variant, list[BenchLoad]]]:
    """Yield each round's number and variant, in turns, with the loads not measured yet."""
    for number, variant in turns([each.variant for each in plan.variants], plan.rounds):
        left = [
            load
            for load in plan.loads
            if not place_of(plan.folder, variant.name, load.name, number).exists()
        ]
        if left:
            yield number, variant, left


def _begin(plan: BenchPlan) -> None:
    """Write the digest, or see that the one that is there says the same."""
    place = plan.folder / DIGEST
    if place.exists():
        if wrong := changed(digest_of(plan.folder), plan.digest):
            name, old, new = wrong[0]
            raise UsageError(
                f"{plan.folder} holds figures of another setup: {name} was {old!r}, is {new!r}",
                why="figures of two setups in one folder would be compared as if they were one's",
                hint="name a new folder: -o DIR; then compare: "
                + quoted("patchkit", "bench", "diff", plan.folder, "DIR"),
            )
        return
    if plan.folder.exists() and any(plan.folder.iterdir()):
        raise UsageError(f"{plan.folder}: is there, and holds no results", hint="-o DIR")
    _write(place, json.dumps(plan.digest, indent=1, sort_keys=True) + "\n")


def _round(
    plan: BenchPlan,
    each: PlannedVariant,
    number: int,
    left: Sequence[BenchLoad],
    tell: Callable[[str], None],
) -> None:
    name = each.variant.name
    title = f"round {number + 1} of {plan.rounds}, {name}"
    with _serving(plan, each, number, lambda text: tell(f"{title}: {text}")) as (url, model):
        client = BenchClient(
            python=each.python,
            url=url,
            model=model,
            tokenizer=plan.tokenizer
            or each.tokenizer
            or (plan.model if model != plan.model else ""),
        )
        for load in left:
            tell(f"{title}: {load.name}")
            place = place_of(plan.folder, name, load.name, number)
            measure(TOOLS[plan.tool], client, load, place, seed=number)
            _write(place, json.dumps(plan.redactor.value(json.loads(read_text(place)))) + "\n")


@contextmanager
def _serving(
    plan: BenchPlan, each: PlannedVariant, number: int, tell: Callable[[str], None]
) -> Iterator[tuple[str, str]]:
    """Serve a variant, and yield where and under which name; what runs at ``url`` stays."""
    if plan.url:
        yield plan.url, plan.model
        return
    tell("the server starts")
    told = "loaded in {:.0f} s, first token {:.1f} s later"
    if each.cluster:
        with held(each.cluster, plan.model, lambda *_: None) as group:
            tell(told.format(group.answered.load_s, group.answered.token_s))
            yield group.url, group.answered.model or plan.model
        return
    log = plan.folder / "log" / f"{each.variant.name}-{number + 1}.log"
    with served(each.words, each.variables, log, plan.patience, lambda _: None) as server:
        tell(told.format(server.load_s, server.token_s))
        yield server.url, server.model
    # Of a server that failed the log stays as it is: who measured has to read it.
    text = read_text(log)
    plan.redactor.learn(text)
    _write(log, plan.redactor.text(text))


def summarise(folder: Path) -> None:
    """Write summary.csv and summary.md of a folder's results. Raises UsageError for none."""
    found = series(folder)
    _write(folder / "summary.csv", csv_text(found))
    _write(folder / "summary.md", markdown(found, digest_of(folder)))


def _write(place: Path, text: str) -> None:
    with translated(at=place):
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place) as file:
            file.write(text.encode())
