"""Download a release: `patchkit fetch`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from patchkit.cli import complete
from patchkit.cli.next_step import next_step, program
from patchkit.cli.options import SourceOptions, offline_option, resolve_options
from patchkit.cli.out import tell
from patchkit.cli.progress import progress
from patchkit.cli.render import Block, Data, Record, rendered
from patchkit.source.archive import unpack
from patchkit.source.resolve import fetch_release


@click.command()
@click.argument(
    "release", metavar="vllm==X.Y.Z|nccl==X.Y.Z", shell_complete=complete.sources("vllm", "nccl")
)
@click.option("--dest", type=click.Path(path_type=Path), help="Unpack it there.")
@offline_option
@rendered
def command(release: str, dest: Path | None, *, offline: bool) -> Iterator[Block]:
    """Download a release: vLLM's sdist from the package index that pip is configured for, NCCL's
    sources from the distribution or from upstream.

    It is verified against what patchkit ships and kept in a cache; prints where it is.
    """
    project = "nccl" if release.lower().startswith("nccl==") else "vllm"
    with progress() as report:
        source = SourceOptions(project, release, offline=offline)
        path = fetch_release(release, resolve_options(report, source))
        if dest is not None:
            path = unpack(path, dest, progress=report("Unpacking"))
    yield Record({"path": path})
    yield Data(f"{path}\n")
    tell(next_step(*program(), "apply", release if dest is None else dest))
