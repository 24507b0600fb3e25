"""Tune the fused-MoE kernel: `patchkit tune`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from patchkit.cli.options import opened, vllm_options
from patchkit.cli.out import PATH, LaidOut, tell
from patchkit.cli.render import Block, Record, rendered
from patchkit.errors import UsageError
from patchkit.measure.tune import BENCHMARK, DTYPES, TuneJob, check_tuner, tune_model
from patchkit.quoting import quoted, visible
from patchkit.source.resolve import SourceOptions

_EPILOG = """\
\b
Qwen3-30B-A3B in FP8, on one GPU:
  patchkit tune --vllm-src vllm==0.25.1 --python venv/bin/python \\
    --model Qwen/Qwen3-30B-A3B-FP8 --dtype fp8_w8a8 -o moe_configs
  VLLM_TUNED_CONFIG_FOLDER=moe_configs vllm serve ...
"""


@click.command(epilog=_EPILOG)
@vllm_options
@click.option("--model", required=True, help="A folder, or a name on the hub: its config.json.")
@click.option(
    "--tp-size", "parts", type=click.IntRange(1), default=1, show_default=True, help="GPUs."
)
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True)
@click.option("--batch-sizes", metavar="M,M,...", default="", help="Default: the release's own.")
@click.option("--python", default=sys.executable, metavar="EXE", help="The Python that has vLLM.")
@click.option(
    "-o",
    "--output",
    type=PATH,
    default=Path("moe_configs"),
    show_default=True,
    help="The folder for the file.",
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@rendered
def command(
    source: SourceOptions, *, python: str, output: Path, force: bool, batch_sizes: str, **given: Any
) -> Iterator[Block]:
    """Tune the fused-MoE kernel for the present GPU with the release's own benchmark.

    SOURCE is the release that is installed; its sdist has the benchmark that the wheel lacks. It
    takes hours: `--batch-sizes 1,64,1024` is a beginning.
    """
    try:
        sizes = tuple(map(int, batch_sizes.split(","))) if batch_sizes else ()
    except ValueError:
        raise UsageError(f"--batch-sizes takes numbers with commas, not {batch_sizes!r}") from None
    if not force and any(output.glob("E=*.json")):  # before hours are spent
        raise UsageError(
            f"{output} holds tuned configs", hint="--force replaces them; -o names a folder"
        )
    with opened(source) as (_, workspace):
        tree = workspace.tree
        if tree.kind == "installed":
            raise UsageError(
                f"{tree.root}: an installed vLLM has no {BENCHMARK}",
                why="wheels carry no benchmarks",
                hint=f"--vllm-src vllm=={tree.version.public}; --python names the installed one",
            )
        tree.read(BENCHMARK)  # which says so if it is not there
        check_tuner(python, tree.version)
        job = TuneJob(batch_sizes=sizes, **given)
        place = tune_model(tree.root / BENCHMARK, python, job, output, tell)
    setting = f"VLLM_TUNED_CONFIG_FOLDER={quoted(output.resolve())}"
    yield Record({"file": place, "setting": setting})
    yield f"wrote {place}; vLLM reads it with"
    yield LaidOut(f"  {visible(setting)}")
