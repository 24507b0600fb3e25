"""Measure a model's server, and compare what was measured: `patchkit bench`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

import click

from patchkit.cli.cluster.bench_view import figures, show
from patchkit.cli.out import LaidOut, as_json, echo, print_json, say, style, table, tell
from patchkit.cluster.models.names import ModelFolder
from patchkit.cluster.openai.http_exchange import server_at
from patchkit.errors import UsageError
from patchkit.measure.bench.difference import between, changed
from patchkit.measure.bench.digest import digest, redactor_of
from patchkit.measure.bench.every_model import (
    MeasuredModel,
    insist_on_all,
    measure_every,
    models_here,
    models_pinned,
)
from patchkit.measure.bench.measure import TOOLS, VLLM
from patchkit.measure.bench.planned import planned, planned_elsewhere
from patchkit.measure.bench.plots import plot
from patchkit.measure.bench.results import ENOUGH, MAIN, digest_of, series
from patchkit.measure.bench.run import BenchPlan, bench, rounds_left
from patchkit.measure.bench.variants import Variant, loads, read_variants
from patchkit.quoting import quoted
from patchkit.runtime.rules.secret_texts import mask_secrets


class _Bench(click.Group):
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
      patchkit bench MODEL --variants variants.toml
      patchkit bench MODEL --cluster cluster.toml
      patchkit bench --all
      patchkit bench diff RESULTS OTHERS
    """


_LEFT = ("round", "variant", "loads", "prompts")
_WAYS = "Ways to serve it, in turns: a TOML file with [[variant]]."


def _numbers(_: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(each) for each in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise UsageError(f"--{option.name} takes whole numbers with commas, not {text!r}")
    return found


@command.command()
@click.argument("model", required=False)
@click.option("--all", "every", is_flag=True, help="All models here, or all of a cluster.")
@click.option("--url", metavar="URL", default="", help="Measure the server that runs there.")
@click.option("--compare", nargs=2, metavar="A B", help="Two env or cluster files, in turns.")
@click.option("--variants", metavar="FILE", type=click.Path(path_type=Path), help=_WAYS)
@click.option("--cluster", metavar="FILE", default="", help="Serve it there, under units.")
@click.option("--venv", metavar="DIR", default="", help="The environment that has vLLM.")
@click.option(
    "--tool", type=click.Choice(list(TOOLS)), default=VLLM, show_default=True, help="Who asks."
)
@click.option("--input", "depths", default="1024", show_default=True, callback=_numbers)
@click.option("--output", "outputs", default="128", show_default=True, callback=_numbers)
@click.option("--concurrency", "at_once", default="1,8,32", show_default=True, callback=_numbers)
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
    model: str | None,
    *,
    every: bool,
    url: str,
    compare: tuple[str, str] | None,
    variants: Path | None,
    cluster: str,
    venv: str,
    tool: str,
    depths: tuple[int, ...],
    outputs: tuple[int, ...],
    at_once: tuple[int, ...],
    prompts: int,
    rounds: int,
    tokenizer: str,
    folder: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Serve a model in one way or several, in turns, and measure each; called again it goes on."""
    if sum(map(bool, (url, compare, variants, cluster))) > 1:
        raise UsageError("--url, --compare, --variants, --cluster: one of them")
    if every == bool(model) or (every and (url or tokenizer)):
        raise UsageError("name a model, or --all of them without --url and --tokenizer")
    # Refuses a login, which every user of a host would see.
    url = server_at(url).url if url else ""
    ways = _ways(compare, variants, cluster, venv)
    load = loads(depths, outputs, at_once, prompts)
    day = date.today().isoformat()

    def measured(name: str, place: Path, commits: Mapping[str, str]) -> None:
        planned_ways = [planned_elsewhere(url, venv)] if url else planned(ways, name, commits)
        redactor = redactor_of(planned_ways)
        plan = BenchPlan(
            model=name,
            variants=planned_ways,
            loads=load,
            rounds=rounds,
            folder=place,
            digest=digest(name, planned_ways, load, TOOLS[tool].name, redactor),
            redactor=redactor,
            tokenizer=tokenizer,
            url=url,
            tool=tool,
        )
        if dry_run:
            _tell_plan(plan, as_json=as_json)
            return
        bench(plan, tell)
        plot(place)

    if model:
        place = folder or Path(f"bench-{Path(model).name}-{day}")
        measured(model, place, {})
        if dry_run:
            return
        _tell_kept(place, as_json=as_json)
        return
    commits = models_pinned(Path(cluster)) if cluster else models_here()
    place = folder or Path(f"bench-all-{day}")
    if dry_run:
        for name, commit in commits.items():
            measured(name, place / ModelFolder(repo=name, commit=commit).name, commits)
        return
    done = measure_every(commits, place, lambda name, own: measured(name, own, commits), tell)
    _tell_all(done, place, as_json=as_json)
    insist_on_all(done)


def _ways(
    compare: tuple[str, str] | None, file: Path | None, cluster: str, venv: str
) -> tuple[Variant, ...]:
    if file:
        return read_variants(file)
    if not compare:
        return (Variant(name="served", venv=venv, cluster=cluster),)
    return tuple(
        Variant(name=each.stem, venv=venv, cluster=str(each))
        if each.suffix == ".toml"
        else Variant(name=each.stem, venv=venv, env_file=str(each))
        for each in map(Path, compare)
    )


def _tell_plan(plan: BenchPlan, *, as_json: bool) -> None:
    """Print what is left to measure, in the order in which it would be."""
    left = [
        (number + 1, variant.name, [load.name for load in own], sum(each.prompts for each in own))
        for number, variant, own in rounds_left(plan)
    ]
    served = {each.variant.name: plan.redactor.text(quoted(*each.words)) for each in plan.variants}
    if as_json:
        rows = [dict(zip(_LEFT, row, strict=True)) for row in left]
        print_json({"dry_run": True, "folder": str(plan.folder), "serves": served, "left": rows})
        return
    for name, words in served.items():
        say(style(name, bold=True) + f": {plan.url or words}")
    for number, name, names, prompts in left:
        say(f"round {number}, {name}: {', '.join(names)}; {prompts} prompts")
    say(f"dry run: {len(left)} rounds are left, into {plan.folder}")


def _tell_kept(place: Path, *, as_json: bool) -> None:
    drawn = sorted(str(each.relative_to(place)) for each in place.glob("plots/*"))
    if as_json:
        print_json({"folder": str(place), "figures": figures(place), "plots": drawn})
        return
    show(place)
    if not drawn:
        hint = quoted(sys.executable, "-m", "pip", "install", "matplotlib")
        say(f"no plots: matplotlib is not installed here; {hint}")
    say(f"kept: {place}/summary.md, summary.csv, digest.json, raw/, plots/ ({len(drawn)} files)")


def _tell_all(done: Sequence[MeasuredModel], place: Path, *, as_json: bool) -> None:
    if as_json:
        models = [
            {"model": each.name, "folder": str(each.folder)}
            | (
                {"error": mask_secrets(each.error.what)}
                if each.error
                else {"figures": figures(each.folder)}
            )
            for each in done
        ]
        print_json({"folder": str(place), "models": models})
        return
    for each in done:
        say(style(each.name, bold=True))
        if each.error is None:
            show(each.folder)
        else:
            say(style("✗", fg="red") + f" {mask_secrets(each.error.what)}")
    say(f"kept: {place}/summary.md, and a folder for each model")


@command.command("diff")
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option("-v", "--verbose", is_flag=True, help="All figures, and long values whole.")
@as_json
def compare_folders(first: Path, second: Path, *, verbose: bool, as_json: bool) -> None:
    """Say what differs between two setups, and whether the figures do by more than their spread."""
    other = changed(digest_of(first), digest_of(second))
    left, right = (series(each) if verbose else series(each, MAIN) for each in (first, second))
    pairs = between(left, right)
    if as_json:
        print_json(
            {
                "setup": [{"what": at, "first": old, "second": new} for at, old, new in other],
                "figures": [
                    {
                        "load": each.first.load,
                        "variants": [each.first.variant, each.second.variant],
                        "figure": each.first.measure.name,
                        "first": list(each.first.values),
                        "second": list(each.second.values),
                        "ratio": each.ratio,
                        "verdict": each.verdict,
                    }
                    for each in pairs
                ],
            }
        )
        return
    say("the setups differ in:" if other else "the setups are the same")
    limit = None if verbose else 40
    echo(table((at, old[:limit], new[:limit]) for at, old, new in other))
    if not pairs:
        raise UsageError(f"{first} and {second} have no variant and load in common")
    say(f"figures, {second} by {first}:")
    echo(
        table(
            (e.first.variant, e.first.load, e.first.measure.name, e.text, e.verdict) for e in pairs
        )
    )
    say(
        LaidOut(
            "better, worse: no value of one reaches the other's; by chance so in 1 of 10 pairs\n"
            "of equals with three repetitions. The figures do not say why."
        )
    )
