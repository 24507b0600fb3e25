"""Measure a model's server, and compare results: `patchkit bench`."""

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import click

from patchkit.cli.cluster.cluster_options import cluster_option
from patchkit.cli.out import LaidOut, table, tell
from patchkit.cli.render import (
    Blocks,
    VerbGroup,
    option,
    options_of,
    rendered,
)
from patchkit.cluster.bench.rounds import (
    ENOUGH,
    MAIN,
    BenchLoad,
    MeasuredServer,
    bench_python,
    compare_series,
    find_changes,
    measure_rounds,
    read_conditions,
    read_series,
    server_of,
)
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.openai.server_answers import server_at
from patchkit.doctor.step_measure import StepRequest, explain_server, keep_step
from patchkit.doctor.step_parts import step_lines
from patchkit.errors import UsageError
from patchkit.frozen import Fields

_COUNT = click.IntRange(1)
_COUNTS = (1, 8, 32)
_PROMPTS = 4  # prompts of a load: so many times its concurrency


def _read_counts(text: str) -> list[int]:
    """Return the whole numbers in a text, where commas separate them."""
    return [_COUNT(number) for number in text.split(",")]


class _Bench(VerbGroup):
    default_command = "run"


# An option that comes first, as in `--why MODEL`, belongs to the default command.
@click.group(cls=_Bench, context_settings={"ignore_unknown_options": True})
def bench_command() -> None:
    """Measure a server with vLLM's own benchmark; compare results.

    \b
      patchkit up openai/gpt-oss-20b
      patchkit bench openai/gpt-oss-20b
      patchkit bench MODEL --url http://HOST:8000
      patchkit bench MODEL --why
      patchkit bench diff RESULTS OTHERS
    """


@bench_command.command("run")
@options_of("bench-server")
@cluster_option
@options_of("bench-tokens")
@option(
    "--concurrency N,N",
    "Requests at once; default: 1,8,32, and 1 with --why.",
    type=_read_counts,
)
@option("--rounds", "Repetitions.", default=ENOUGH, show_default=True)
@options_of("bench")
@options_of("bench-why")
@rendered
def run_bench(
    model: str, cluster: Cluster, folder: Path | None, **options: Any
) -> Blocks:
    """Measure a model that `patchkit up` serves, or the server at --url."""
    day = date.today().isoformat()
    folder = folder or Path(f"bench-{Path(model).name}-{day}")
    if options["explains"]:
        yield from _explain(model, cluster, folder, options)
        return

    loads = [
        BenchLoad(
            depth=options["depth"],
            output=options["output"],
            concurrency=count,
            prompts=_PROMPTS * count,
        )
        for count in options["concurrency"] or _COUNTS
    ]

    server = _measured_server(model, cluster, options["url"], options["venv"] or "")
    if options["tokenizer"]:
        server = replace(server, tokenizer=options["tokenizer"])
    measure_rounds(server, loads, options["rounds"], folder, tell)

    all_series = read_series(folder)
    yield {"folder": folder, "figures": all_series}
    yield from table(
        (series.load, series.figure, f"{series.text} {series.unit}")
        for series in all_series
        if series.figure in MAIN
    )
    yield f"kept: {folder}/digest.json, raw/"


def _explain(model: str, cluster: Cluster, folder: Path, options: Fields) -> Blocks:
    """Explain a step for each number of requests; keep what is said of the last one."""
    venv = options["venv"]
    for count in options["concurrency"] or (1,):
        tell(f"{count} requests at once: {options['seconds']:.0f} s")
        request = StepRequest(
            cluster=cluster,
            model=model,
            url=options["url"] or "",
            requests=count,
            log=options["log"],
            python=f"{venv}/bin/python" if venv else "",
            seconds=options["seconds"],
        )
        explained = explain_server(request)
        yield {"step": explained}
        yield from step_lines(explained)

    keep_step(explained, folder)
    yield f"kept: {folder}/why.json"


def _measured_server(
    model: str, cluster: Cluster, url: str | None, venv: str
) -> MeasuredServer:
    """Return the server at ``url`` or, without one, that of the cluster."""
    if not url:
        return server_of(cluster, model, venv)

    server = server_at(url.rstrip("/").removesuffix("/v1"))
    python = bench_python(venv)
    return MeasuredServer(url=server.url, python=python, model=model, tokenizer=model)


@bench_command.command("diff")
@options_of("bench-diff")
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
        raise UsageError(f"{first} and {second} have no load in common")

    yield f"figures, {second} by {first}:"
    shown = [pair for pair in pairs if verbose or pair.first.figure in MAIN]
    yield from table(
        (pair.first.load, pair.first.figure, pair.text, pair.verdict) for pair in shown
    )
    yield LaidOut(
        "better, worse: no value of one reaches the other's; by chance so in 1 of 10 pairs\n"
        "of equals with three repetitions. The figures do not say why."
    )
