"""Measure a model's server, and compare what was measured: `patchkit bench`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

import click

from patchkit.cli.out import LaidOut, as_json, echo, print_json, say, style, table, tell
from patchkit.cli.render import VerbGroup
from patchkit.cluster.openai.http_exchange import server_at
from patchkit.errors import UsageError
from patchkit.measure.figures import (
    ENOUGH,
    MAIN,
    FigureDifference,
    compare_folders,
    compare_variants,
    find_changes,
    read_conditions,
    read_series,
)
from patchkit.measure.rounds import BenchPlan, measure_variants
from patchkit.measure.variants import (
    BenchLoad,
    PlannedVariant,
    describe_conditions,
    plan_cluster,
    plan_file,
    plan_here,
    plan_url,
)
from patchkit.quoting import quoted
from patchkit.runtime.rules.secret_texts import mask_secrets


class _Bench(VerbGroup):
    default = "run"

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Take a first word that is no verb for the model of `run`."""
        verb = [] if args[0] in self.commands or args[0] == "--help" else [self.default]
        return super().resolve_command(ctx, [*verb, *args])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ("--help", "-h"):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Bench)
def command() -> None:
    """Measure a server with vLLM's own benchmark; compare results.

    \b
      patchkit bench openai/gpt-oss-20b
      patchkit bench MODEL --compare a.env b.env
      patchkit bench MODEL --cluster cluster.toml
      patchkit bench MODEL --url http://HOST:8000
      patchkit bench diff RESULTS OTHERS
    """


def _read_numbers(_: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        found = tuple(map(int, text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise UsageError(f"--{option.name} takes whole numbers with commas, not {text!r}")
    return found


@command.command()
@click.argument("model")
@click.argument("args", nargs=-1)
@click.option("--url", metavar="URL", default="", help="Measure the server that runs there.")
@click.option(
    "--compare",
    nargs=2,
    metavar="A B",
    type=click.Path(path_type=Path),
    help="Two env files or two cluster files, in turns.",
)
@click.option(
    "--cluster",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Serve it there, under units.",
)
@click.option("--venv", metavar="DIR", default="", help="The environment that has vLLM.")
@click.option("--input", "depth", type=click.IntRange(1), default=1024, show_default=True)
@click.option("--output", type=click.IntRange(1), default=128, show_default=True)
@click.option("--concurrency", default="1,8,32", show_default=True, callback=_read_numbers)
@click.option(
    "--prompts", default=4, show_default=True, help="Prompts for each place of the concurrency."
)
@click.option("--rounds", default=ENOUGH, show_default=True, help="Repetitions.")
@click.option("--tokenizer", metavar="DIR", default="", help="Default: the model's.")
@click.option(
    "-o",
    "--output-dir",
    "folder",
    type=click.Path(path_type=Path),
    help="Default: bench-MODEL-DAY.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be served and measured.")
@as_json
def run(
    model: str,
    *,
    args: tuple[str, ...],
    url: str,
    compare: tuple[Path, Path] | None,
    cluster: Path | None,
    venv: str,
    depth: int,
    output: int,
    concurrency: tuple[int, ...],
    prompts: int,
    rounds: int,
    tokenizer: str,
    folder: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Serve a model in one way or two, in turns, and measure each; called again it goes on.

    Words behind `--` are added to the `vllm serve` of each.
    """
    if sum(map(bool, (url, compare, cluster))) > 1:
        raise UsageError("--url, --compare, --cluster: one of them")
    if url:
        variants = [plan_url(server_at(url).url, venv)]  # which refuses a login in it
    elif compare:
        variants = [plan_file(path, model, venv, args) for path in compare]
    elif cluster:
        variants = [plan_cluster(cluster, model, venv, args)]
    else:
        variants = [plan_here(model, venv, args)]
    loads = [
        BenchLoad(depth=depth, output=output, concurrency=count, prompts=max(4, prompts * count))
        for count in concurrency
    ]
    plan = BenchPlan(
        model=model,
        variants=variants,
        loads=loads,
        rounds=rounds,
        folder=folder or Path(f"bench-{Path(model).name}-{date.today().isoformat()}"),
        conditions=describe_conditions(model, variants, loads),
        tokenizer=tokenizer,
    )
    if dry_run:
        _show_plan(plan, as_json=as_json)
        return
    measure_variants(plan, tell)
    _show_results(plan.folder, variants, as_json=as_json)


def _show_plan(plan: BenchPlan, *, as_json: bool) -> None:
    """Print what is left to measure, in the order in which it would be."""
    served = {each.name: each.url or mask_secrets(quoted(*each.words)) for each in plan.variants}
    left = [
        {
            "round": number + 1,
            "variant": variant.name,
            "loads": [load.name for load in loads],
            "prompts": sum(load.prompts for load in loads),
        }
        for number, variant, loads in plan.left()
    ]
    if as_json:
        print_json({"dry_run": True, "folder": str(plan.folder), "serves": served, "left": left})
        return
    for name, words in served.items():
        say(style(name, bold=True) + f": {words}")
    for number, variant, loads in plan.left():
        names = ", ".join(load.name for load in loads)
        count = sum(load.prompts for load in loads)
        say(f"round {number + 1}, {variant.name}: {names}; {count} prompts")
    say(f"dry run: {len(left)} rounds are left, into {plan.folder}")


def _show_results(folder: Path, variants: Sequence[PlannedVariant], *, as_json: bool) -> None:
    if as_json:
        figures = [
            {
                "variant": series.variant,
                "load": series.load,
                "figure": series.measure.name,
                "unit": series.measure.unit,
                "median": series.median,
                "values": list(series.values),
            }
            for series in read_series(folder)
        ]
        print_json({"folder": str(folder), "figures": figures})
        return
    found = read_series(folder, MAIN)
    echo(
        table(
            (each.load, each.measure.name, each.variant, f"{each.text} {each.measure.unit}")
            for each in found
        )
    )
    first, *others = (variant.name for variant in variants)
    for name in others:
        say(f"{name} against {first}, by round:")
        _show_differences(compare_variants(found, first, name))
    say(f"kept: {folder}/digest.json, raw/, log/")


def _show_differences(pairs: Sequence[FigureDifference]) -> None:
    echo(
        table(
            (pair.first.variant, pair.first.load, pair.first.measure.name, pair.text, pair.verdict)
            for pair in pairs
        )
    )
    say(
        LaidOut(
            "better, worse: no value of one reaches the other's; by chance so in 1 of 10 pairs\n"
            "of equals with three repetitions. The figures do not say why."
        )
    )


@command.command("diff")
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option("-v", "--verbose", is_flag=True, help="All figures, and long values whole.")
@as_json
def compare_results(first: Path, second: Path, *, verbose: bool, as_json: bool) -> None:
    """Say what differs between two setups, and whether the figures do by more than their spread."""
    changes = find_changes(read_conditions(first), read_conditions(second))
    left, right = (
        read_series(folder) if verbose else read_series(folder, MAIN) for folder in (first, second)
    )
    pairs = compare_folders(left, right)
    if as_json:
        print_json(
            {
                "setup": [{"what": at, "first": old, "second": new} for at, old, new in changes],
                "figures": [
                    {
                        "load": pair.first.load,
                        "variants": [pair.first.variant, pair.second.variant],
                        "figure": pair.first.measure.name,
                        "first": list(pair.first.values),
                        "second": list(pair.second.values),
                        "ratio": pair.ratio,
                        "verdict": pair.verdict,
                    }
                    for pair in pairs
                ],
            }
        )
        return
    say("the setups differ in:" if changes else "the setups are the same")
    limit = None if verbose else 40
    echo(table((at, old[:limit], new[:limit]) for at, old, new in changes))
    if not pairs:
        raise UsageError(f"{first} and {second} have no variant and load in common")
    say(f"figures, {second} by {first}:")
    _show_differences(pairs)
