"""Measure a model's server, and compare results: `patchkit bench`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import click

from patchkit.cli.cluster.cluster_options import VENV_OPTION, cluster_here
from patchkit.cli.out import PATH, LaidOut, table, tell
from patchkit.cli.render import (
    Blocks,
    Row,
    VerbGroup,
    option,
    rendered,
    verbose_option,
)
from patchkit.cluster.bench.benchmark import BenchLoad
from patchkit.cluster.bench.figures import (
    ENOUGH,
    MAIN,
    FigureDifference,
    Series,
    compare_series,
    find_changes,
    read_conditions,
    read_series,
)
from patchkit.cluster.bench.rounds import (
    BenchPlan,
    PlannedVariant,
    bench_python,
    measure_variants,
    plan_cluster,
)
from patchkit.cluster.launch.cluster import read_cluster_file
from patchkit.cluster.launch.up import StartWatcher
from patchkit.cluster.openai.server_answers import server_at
from patchkit.doctor.symptoms.findings import explain_failed_start
from patchkit.errors import UsageError
from patchkit.frozen import Texts

_COUNT = click.IntRange(1)
_PROMPTS = 4  # prompts of a load: so many times its concurrency
_SILENT = StartWatcher(
    tell=lambda *_: None,
    explain=explain_failed_start,
    note=lambda _: None,
)


def _read_counts(text: str) -> list[int]:
    """Return the whole numbers in a text, where commas separate them."""
    return [_COUNT(number) for number in text.split(",")]


class _Bench(VerbGroup):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Take a first word that is no command for the model of `run`."""
        if args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=_Bench)
def bench_command() -> None:
    """Measure a server with vLLM's own benchmark; compare results.

    \b
      patchkit bench openai/gpt-oss-20b
      patchkit bench MODEL --cluster cluster.toml
      patchkit bench MODEL --cluster a.toml --cluster b.toml
      patchkit bench MODEL --url http://HOST:8000
      patchkit bench diff RESULTS OTHERS
    """


@bench_command.command("run")
@click.argument("model")
@click.argument("args", nargs=-1)
@option("--url URL", "Measure the server that runs there.")
@option(
    "--cluster FILE", "Serve on this cluster; two in turns.", multiple=True, type=PATH
)
@VENV_OPTION
@option(
    "--input",
    "depth",
    "Tokens of a prompt.",
    type=_COUNT,
    default=1024,
    show_default=True,
)
@option(
    "--output",
    "Tokens of an answer.",
    type=_COUNT,
    default=128,
    show_default=True,
)
@option(
    "--concurrency N,N",
    "Requests at once.",
    type=_read_counts,
    default="1,8,32",
    show_default=True,
)
@option("--rounds", "Repetitions.", default=ENOUGH, show_default=True)
@option("--tokenizer DIR", "Folder of a tokenizer; default: the model's.", default="")
@option("-o DIR", "folder", "Folder; default: bench-MODEL-DAY.", type=PATH)
@rendered
def run_bench(model: str, args: Texts, folder: Path | None, **options: Any) -> Blocks:
    """Serve a model in one way or two, in turns, and measure each.

    Words behind `--` are added to the `vllm serve` of each.
    """
    variants = list(_planned_variants(model, args, options))

    loads = [
        BenchLoad(
            depth=options["depth"],
            output=options["output"],
            concurrency=count,
            prompts=_PROMPTS * count,
        )
        for count in options["concurrency"]
    ]

    day = date.today().isoformat()
    plan = BenchPlan(
        model=model,
        variants=variants,
        loads=loads,
        rounds=options["rounds"],
        folder=folder or Path(f"bench-{Path(model).name}-{day}"),
        tokenizer=options["tokenizer"],
    )
    measure_variants(plan, _SILENT, tell)

    all_series = read_series(plan.folder)
    yield {"folder": plan.folder, "figures": all_series}
    main_series = [series for series in all_series if series.figure in MAIN]
    yield from table(map(_series_row, main_series))

    baseline, *compared = [
        [series for series in main_series if series.variant == variant.name]
        for variant in variants
    ]
    for group in compared:
        yield f"{group[0].variant} against {baseline[0].variant}, by round:"
        yield from _difference_lines(compare_series(baseline, group))

    yield f"kept: {plan.folder}/digest.json, raw/"


def _planned_variants(
    model: str, args: Texts, options: Mapping[str, Any]
) -> Iterator[PlannedVariant]:
    """Yield the variants to measure: the server at --url, those of cluster files, or one here."""
    venv = options["venv"] or ""
    url = options["url"]
    files = options["cluster"]
    if url and files:
        raise UsageError("--url, --cluster: one of them")

    if url:
        server = server_at(url.rstrip("/").removesuffix("/v1"))
        python = bench_python(venv)
        yield PlannedVariant(name="served", python=python, url=server.url)
    elif not files:
        yield plan_cluster(cluster_here(venv), "served", model, venv, args)

    for path in files:
        yield plan_cluster(read_cluster_file(path), path.stem, model, venv, args)


def _series_row(series: Series) -> Row:
    figures = f"{series.text} {series.unit}"
    return series.load, series.figure, series.variant, figures


@bench_command.command("diff")
@click.argument("first", type=PATH)
@click.argument("second", type=PATH)
@verbose_option
@rendered
def compare_results(first: Path, second: Path, verbose: bool) -> Blocks:
    """Compare two setups, and say whether their figures differ by more than the spread."""
    changes = find_changes(read_conditions(first), read_conditions(second))
    setup = [{"what": what, "first": old, "second": new} for what, old, new in changes]

    pairs = compare_series(read_series(first), read_series(second))
    yield {"setup": setup, "figures": pairs}

    yield "the setups differ in:" if changes else "the setups are the same"

    limit = None if verbose else 40
    yield from table((name, old[:limit], new[:limit]) for name, old, new in changes)
    if not pairs:
        raise UsageError(f"{first} and {second} have no variant and load in common")

    yield f"figures, {second} by {first}:"
    shown = [pair for pair in pairs if verbose or pair.first.figure in MAIN]
    yield from _difference_lines(shown)


def _difference_lines(pairs: Sequence[FigureDifference]) -> Blocks:
    rows = []
    for pair in pairs:
        series = pair.first
        names = (series.variant, series.load, series.figure)
        rows.append((*names, pair.text, pair.verdict))
    yield from table(rows)
    yield LaidOut(
        "better, worse: no value of one reaches the other's; by chance so in 1 of 10 pairs\n"
        "of equals with three repetitions. The figures do not say why."
    )
