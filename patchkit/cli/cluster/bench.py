"""Measure a model's server, and compare what was measured: `patchkit bench`."""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path

import click

from patchkit.cli.out import LaidOut, as_json, echo, print_json, say, table
from patchkit.errors import UsageError
from patchkit.quoting import quoted
from patchkit.runtime.bench.difference import between, changed, differences
from patchkit.runtime.bench.digest import digest, redactor_of
from patchkit.runtime.bench.planned import planned
from patchkit.runtime.bench.plots import plot
from patchkit.runtime.bench.results import ENOUGH, MAIN, digest_of, series
from patchkit.runtime.bench.run import BenchPlan, bench
from patchkit.runtime.bench.variants import Variant, loads, read_variants


class _Bench(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Take a first word that is no verb for the model of `run`."""
        verb = [] if args[0] in self.commands or args[0] == "--help" else ["run"]
        return super().resolve_command(ctx, [*verb, *args])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ("--help", "-h"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Bench)
def command() -> None:
    """Measure a server with vLLM's own benchmark; compare results.

    \b
      patchkit bench openai/gpt-oss-20b
      patchkit bench MODEL --compare a.env b.env
      patchkit bench MODEL --variants variants.toml
      patchkit bench diff RESULTS OTHERS
    """


def _numbers(_: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(each) for each in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise UsageError(f"--{option.name} takes whole numbers with commas, not {text!r}")
    return found


@command.command()
@click.argument("model")
@click.option("--url", metavar="URL", default="", help="Measure the server that runs there.")
@click.option("--compare", nargs=2, metavar="A.env B.env", help="Two env files, in turns.")
@click.option(
    "--variants",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Ways to serve it, in turns: a TOML file with [[variant]].",
)
@click.option("--venv", metavar="DIR", default="", help="The environment that has vLLM.")
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
@as_json
def run(
    model: str,
    *,
    url: str,
    compare: tuple[str, str] | None,
    variants: Path | None,
    venv: str,
    depths: tuple[int, ...],
    outputs: tuple[int, ...],
    at_once: tuple[int, ...],
    prompts: int,
    rounds: int,
    tokenizer: str,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Serve a model in one way or several, in turns, and measure each; called again it goes on."""
    if sum(map(bool, (url, compare, variants))) > 1:
        raise UsageError("--url, --compare, --variants: one of them")
    ways = planned(_ways(compare, variants, venv), model)
    redactor = redactor_of(ways)
    load = loads(depths, outputs, at_once, prompts)
    place = folder or Path(f"bench-{Path(model).name}-{date.today().isoformat()}")
    plan = BenchPlan(
        model=model,
        variants=ways,
        loads=load,
        rounds=rounds,
        folder=place,
        digest=digest(model, ways, load, "vllm bench serve", redactor),
        redactor=redactor,
        tokenizer=tokenizer,
        url=url.rstrip("/"),
    )
    bench(plan, lambda step: say(step, err=True))
    plots, missing = plot(place)
    if as_json:
        print_json({"folder": str(place), "figures": _figures(place), "plots": plots})
        return
    _show(place)
    if missing:
        say(f"no plots: {missing}; {quoted(sys.executable, '-m', 'pip', 'install', 'matplotlib')}")
    say(f"kept: {place}/summary.md, summary.csv, digest.json, raw/, plots/ ({len(plots)} files)")


def _ways(compare: tuple[str, str] | None, file: Path | None, venv: str) -> tuple[Variant, ...]:
    if file:
        return read_variants(file)
    if compare:
        names = [Path(each).stem for each in compare]
        return tuple(
            Variant(name=name, env_file=each, venv=venv)
            for name, each in zip(names, compare, strict=True)
        )
    return (Variant(name="served", venv=venv),)


def _figures(folder: Path) -> list[dict[str, object]]:
    return [
        {
            "variant": each.variant,
            "load": each.load,
            "figure": each.measure.name,
            "unit": each.measure.unit,
            "median": each.median,
            "values": list(each.values),
        }
        for each in series(folder)
    ]


def _show(folder: Path) -> None:
    found = series(folder, MAIN)
    names = list(dict.fromkeys(each.variant for each in found))
    echo(
        table(
            (each.load, each.measure.name, each.variant, f"{each.text} {each.measure.unit}")
            for each in found
        )
    )
    of = {name: [each for each in found if each.variant == name] for name in names}
    for name in names[1:]:
        say(f"{name} against {names[0]}, by round:")
        echo(
            table(
                (each.first.load, each.first.measure.name, each.text, each.verdict)
                for each in differences(of[names[0]], of[name])
            )
        )


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
