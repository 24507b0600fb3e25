"""Tune the fused-MoE kernel: `patchkit tune`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from patchkit.cli.options import (
    STDOUT,
    Renamed,
    SourceOptions,
    as_json,
    opened,
    vllm_options,
)
from patchkit.cli.out import LaidOut, data, echo, print_json, say, style, table, tell
from patchkit.errors import HostError, StorageError, UsageError
from patchkit.measure.tune.process import measuring
from patchkit.measure.tune.tune import (
    ELEMENT_BYTES,
    GRID,
    Job,
    Row,
    Tuned,
    check_benchmark,
    connect,
    file_text,
    median,
    row_fields,
    tune,
)
from patchkit.quoting import quoted, visible

_EPILOG = """\
\b
Qwen3-30B-A3B in FP8 with blocks, on one GPU:
  patchkit tune --vllm-src vllm==0.25.1 --python venv/bin/python --experts 128 \\
    --intermediate 768 --hidden 2048 --topk 8 --block-shape 128,128 -o moe_configs
  VLLM_TUNED_CONFIG_FOLDER=moe_configs vllm serve ...
"""


def _integers(text: str, option: str, count: int = 0) -> tuple[int, ...]:
    try:
        numbers = tuple(map(int, text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or (count and len(numbers) != count):
        raise UsageError(f"{option} takes {count or 'some'} numbers with commas, not {text!r}")
    return numbers


@click.command(epilog=_EPILOG)
@vllm_options
@click.option("--experts", type=int, required=True, metavar="E", help="Experts of one layer.")
@click.option(
    "--intermediate",
    type=int,
    required=True,
    metavar="N",
    help="moe_intermediate_size, divided by the tensor parallel size.",
)
@click.option("--hidden", type=int, required=True, metavar="H", help="hidden_size.")
@click.option("--topk", type=int, required=True, metavar="K", help="Experts per token.")
@click.option("--dtype", default="fp8_w8a8", metavar="|".join(ELEMENT_BYTES), show_default=True)
@click.option("--block-shape", metavar="N,K", help="FP8 weight blocks, for example 128,128.")
@click.option("--batch-sizes", metavar="M,M,...", help=f"[default: {','.join(map(str, GRID))}]")
@click.option("--budget", type=float, default=1800.0, show_default=True, metavar="SECONDS")
@click.option(
    "--max-configs", "most", type=int, default=100, show_default=True, help="Per batch size."
)
@click.option(
    "--repeats",
    type=click.IntRange(min=3),
    default=5,
    show_default=True,
    help="Of the comparison.",
)
@click.option("--python", default=sys.executable, metavar="EXE", help="The Python that has vLLM.")
@click.option(
    "-o",
    "--output",
    cls=Renamed,
    former=["--out"],
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder; - prints the file alone.  [default: .]",
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@as_json
def command(
    source: SourceOptions,
    *,
    block_shape: str | None,
    batch_sizes: str | None,
    python: str,
    output: Path,
    force: bool,
    as_json: bool,
    **sizes: int,
) -> None:
    """Tune the fused-MoE kernel for the present GPU with the release's own benchmark.

    SOURCE is the release that is installed; its sdist has the benchmark that the wheel lacks. Each
    batch size is searched within the budget, then compared with the untuned config in alternation;
    a row that is not clearly faster stays untuned. A search that the budget cuts short keeps
    its best.
    """
    if block_shape:
        sizes["block_shape"] = _integers(block_shape, "--block-shape", 2)  # type: ignore[assignment]
    if batch_sizes:
        sizes["batch_sizes"] = _integers(batch_sizes, "--batch-sizes")  # type: ignore[assignment]
    job = Job(**sizes)  # type: ignore[arg-type]
    job.check()
    with measuring(python) as bench, opened(source) as (_, workspace):
        check_benchmark(workspace.tree)
        facts = connect(bench, job, workspace.tree)
        # Refused before the budget is spent, not after.
        place = output / facts["name"]
        if output != STDOUT and place.exists() and not force:
            raise UsageError(f"{place} exists", hint="--force replaces it; -o names a folder")
        outcome = tune(bench, job, facts, lambda size, what: tell(f"batch size {size}: {what}"))
    if not outcome.rows:
        raise HostError(
            f"nothing was tuned: {outcome.stopped}", hint="a larger --budget, fewer --batch-sizes"
        )
    text = file_text(outcome, ELEMENT_BYTES[job.dtype])
    if output == STDOUT:
        data(text)
        return
    _write(place, text)
    if as_json:
        print_json(_fields(outcome, place))
    else:
        _print(outcome, place, job)


def _write(place: Path, text: str) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        # Measured for minutes or hours: never half of it, and never half of what was there.
        draft = place.with_name(f".{place.name}.new")
        draft.write_text(text, encoding="utf-8")
        draft.replace(place)
    except OSError as error:
        raise StorageError(f"{place}: {error.strerror}") from error


def _fields(outcome: Tuned, place: Path) -> dict[str, object]:
    keys = ("device", "capability", "shared_memory", "vllm", "torch", "triton")
    return {
        **{key: outcome.facts[key] for key in keys},
        "file": str(place),
        "complete": outcome.complete,
        "stopped": outcome.stopped or None,
        "rows": list(row_fields(outcome.rows)),
    }


def _print(outcome: Tuned, place: Path, job: Job) -> None:
    facts = outcome.facts
    title = style(f"{facts['device']}, vLLM {facts['vllm']}, torch {facts['torch']}", bold=True)
    say(title + f", triton {facts['triton']}, {facts['shared_memory']} bytes of shared memory")
    heads = ("batch", "ratio", "in the file", "untuned µs", "tuned µs", "configs")
    echo(table(map(_cells, outcome.rows), heads=heads, labels=["untuned µs", "tuned µs"]))
    missing = [size for size in job.batch_sizes if size not in {r.batch_size for r in outcome.rows}]
    if missing:
        left = ", ".join(map(str, missing))
        say(f"{outcome.stopped}: batch sizes {left} stay untuned")
    if cut := [str(row.batch_size) for row in outcome.rows if not row.complete]:
        say(f"search cut short, best so far kept: batch sizes {', '.join(cut)}")
    setting = f"VLLM_TUNED_CONFIG_FOLDER={quoted(place.parent.resolve())}"
    say(f"wrote {place}; vLLM reads it with")
    say(LaidOut(f"  {visible(setting)}"))


def _cells(row: Row) -> tuple[str, ...]:
    chosen = "tuned" if row.faster else f"{row.source}: not clearly slower"
    ratio = f"{row.ratio:.2f}" if row.untuned_times else "untuned cannot run"
    return (
        str(row.batch_size),
        ratio,
        chosen,
        _spread(row.untuned_times),
        _spread(row.tuned_times),
        f"{row.measured}{'' if row.complete else '+'}",
    )


def _spread(times: tuple[float, ...]) -> str:
    if not times:
        return "-"
    return f"{median(times):.1f} ({min(times):.1f}-{max(times):.1f})"
