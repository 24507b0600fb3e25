"""Measure a model's server, and compare what was measured: `patchkit bench`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import click

from patchkit.cli.cluster.cluster_options import cluster_here
from patchkit.cli.out import PATH, LaidOut, table, tell
from patchkit.cli.render import (
    Block,
    Record,
    VerbGroup,
    rendered,
    verbose_option,
)
from patchkit.cluster.bench.benchmark import BenchLoad
from patchkit.cluster.bench.figures import (
    ENOUGH,
    MAIN,
    FigureDifference,
    compare_series,
    find_changes,
    read_conditions,
    read_series,
)
from patchkit.cluster.bench.rounds import BenchPlan, measure_variants
from patchkit.cluster.bench.variants import (
    PlannedVariant,
    describe_conditions,
    plan_cluster,
    venv_python,
)
from patchkit.cluster.launch.cluster_file import read_cluster_file
from patchkit.cluster.launch.up import StartWatcher
from patchkit.cluster.openai.server_answers import server_at
from patchkit.doctor.symptoms.findings import explain_failed_start
from patchkit.errors import UsageError

_PROMPTS = 4  # for each place of the concurrency
_SILENT = StartWatcher(
    tell=lambda *_: None,
    explain=explain_failed_start,
    warn=lambda _: None,
    note=lambda _: None,
)


def _read_numbers(
    _context: click.Context, option: click.Parameter, text: str
) -> tuple[int, ...]:
    """Return the whole numbers of an option's text, which has commas between them."""
    numbers = text.split(",")
    if not all(number.isdecimal() and int(number) for number in numbers):
        what = f"{option.opts[-1]} takes whole numbers with commas, not {text!r}"
        raise UsageError(what)
    return tuple(map(int, numbers))


class _Bench(VerbGroup):
    default = "run"

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Take a first word that is no verb for the model of `run`."""
        verb = [] if args[0] in self.commands or args[0] == "--help" else [self.default]
        return super().resolve_command(ctx, [*verb, *args])


@click.group(cls=_Bench)
def bench_command() -> None:
    """Measure a server with vLLM's own benchmark; compare results.

    \b
      patchkit bench openai/gpt-oss-20b
      patchkit bench MODEL --compare a.toml b.toml
      patchkit bench MODEL --cluster cluster.toml
      patchkit bench MODEL --url http://HOST:8000
      patchkit bench diff RESULTS OTHERS
    """


@bench_command.command("run")
@click.argument("model")
@click.argument("args", nargs=-1)
@click.option(
    "--url", metavar="URL", default="", help="Measure the server that runs there."
)
@click.option(
    "--compare", nargs=2, metavar="A B", type=PATH, help="Two cluster files, in turns."
)
@click.option(
    "--cluster", metavar="FILE", type=PATH, help="Serve it there, under units."
)
@click.option(
    "--venv", metavar="DIR", default="", help="The environment that has vLLM."
)
@click.option(
    "--input", "depth", type=click.IntRange(1), default=1024, show_default=True
)
@click.option("--output", type=click.IntRange(1), default=128, show_default=True)
@click.option(
    "--concurrency", default="1,8,32", show_default=True, callback=_read_numbers
)
@click.option("--rounds", default=ENOUGH, show_default=True, help="Repetitions.")
@click.option("--tokenizer", metavar="DIR", default="", help="Default: the model's.")
@click.option(
    "-o", "folder", metavar="DIR", type=PATH, help="Default: bench-MODEL-DAY."
)
@rendered
def run_bench(
    model: str,
    *,
    args: tuple[str, ...],
    url: str,
    venv: str,
    folder: Path | None,
    **given: Any,
) -> Iterator[Block]:
    """Serve a model in one way or two, in turns, and measure each; called again it goes on.

    Words behind `--` are added to the `vllm serve` of each.
    """
    compare, cluster = given["compare"], given["cluster"]
    if sum(map(bool, (url, compare, cluster))) > 1:
        raise UsageError("--url, --compare, --cluster: one of them")
    if url:
        server = server_at(url.rstrip("/").removesuffix("/v1"))
        variants = [
            PlannedVariant(name="served", python=venv_python(venv), url=server.url)
        ]
    elif files := compare or (cluster and [cluster]):
        variants = [
            plan_cluster(read_cluster_file(path), path.stem, model, venv, args)
            for path in files
        ]
    else:
        variants = [
            plan_cluster(cluster_here(venv or None).file, "served", model, venv, args)
        ]
    size = {"depth": given["depth"], "output": given["output"]}
    loads = [
        BenchLoad(**size, concurrency=count, prompts=_PROMPTS * count)
        for count in given["concurrency"]
    ]
    plan = BenchPlan(
        model=model,
        variants=variants,
        loads=loads,
        rounds=given["rounds"],
        folder=folder or Path(f"bench-{Path(model).name}-{date.today().isoformat()}"),
        conditions=describe_conditions(model, variants, loads),
        tokenizer=given["tokenizer"],
    )
    measure_variants(plan, _SILENT, tell)
    all_series = read_series(plan.folder)
    yield Record({"folder": plan.folder, "figures": all_series})
    main = [series for series in all_series if series.measure in MAIN]
    yield from table(
        (it.load, it.measure.name, it.variant, f"{it.text} {it.measure.unit}")
        for it in main
    )
    first, *others = (
        [it for it in main if it.variant == variant.name] for variant in variants
    )
    for second in others:
        yield f"{second[0].variant} against {first[0].variant}, by round:"
        yield from _difference_lines(compare_series(first, second))
    yield f"kept: {plan.folder}/digest.json, raw/"


@bench_command.command("diff")
@click.argument("first", type=PATH)
@click.argument("second", type=PATH)
@verbose_option
@rendered
def compare_results(first: Path, second: Path, *, verbose: bool) -> Iterator[Block]:
    """Say what differs between two setups, and whether the figures do by more than their spread."""
    changes = find_changes(read_conditions(first), read_conditions(second))
    setup = [{"what": at, "first": old, "second": new} for at, old, new in changes]
    pairs = compare_series(read_series(first), read_series(second))
    yield Record({"setup": setup, "figures": pairs})
    yield "the setups differ in:" if changes else "the setups are the same"
    limit = None if verbose else 40
    yield from table((at, old[:limit], new[:limit]) for at, old, new in changes)
    if not pairs:
        raise UsageError(f"{first} and {second} have no variant and load in common")
    yield f"figures, {second} by {first}:"
    yield from _difference_lines(
        [it for it in pairs if verbose or it.first.measure in MAIN]
    )


def _difference_lines(pairs: Sequence[FigureDifference]) -> Iterator[Block]:
    yield from table(
        (
            pair.first.variant,
            pair.first.load,
            pair.first.measure.name,
            pair.text,
            pair.verdict,
        )
        for pair in pairs
    )
    yield LaidOut(
        "better, worse: no value of one reaches the other's; by chance so in 1 of 10 pairs\n"
        "of equals with three repetitions. The figures do not say why."
    )
