"""Download a release: `patchkit fetch`."""

from __future__ import annotations

from pathlib import Path

import click

from patchkit.cli import complete
from patchkit.cli.next_step import next_step, program
from patchkit.cli.options import SourceOptions, as_json, resolve_options
from patchkit.cli.out import data, print_json, tell
from patchkit.cli.progress import progress
from patchkit.source.archive import unpack
from patchkit.source.resolve import fetch_release


@click.command()
@click.argument(
    "release",
    metavar="vllm==X.Y.Z|nccl==X.Y.Z",
    shell_complete=complete.sources("vllm", "nccl", files=False),
)
@click.option("--dest", type=click.Path(path_type=Path), help="Unpack it there.")
@click.option("--offline", is_flag=True, help="Use only what is in the cache.")
@as_json
def command(release: str, dest: Path | None, *, offline: bool, as_json: bool) -> None:
    """Download a release: vLLM's sdist from the package index that pip is configured for, NCCL's
    sources from the distribution or from upstream.

    It is verified against what patchkit ships and kept in a cache; prints where it is.
    """
    project = "nccl" if release.lower().startswith("nccl==") else "vllm"
    with progress() as report:
        path = fetch_release(
            release, resolve_options(report, SourceOptions(project, release, offline=offline))
        )
        if dest is not None:
            path = unpack(path, dest, progress=report("Unpacking"))
    if as_json:
        print_json({"path": str(path)})
        return
    data(f"{path}\n")
    tell(next_step(*program(), "apply", release if dest is None else dest))
