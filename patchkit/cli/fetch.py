"""patchkit fetch"""

from __future__ import annotations

from pathlib import Path

import click

from patchkit.cli.options import progress
from patchkit.recipe import load_recipe
from patchkit.source.archive import unpack
from patchkit.source.resolve import Options, fetch_release


@click.command()
@click.argument("release", metavar="vllm==X.Y.Z")
@click.option("--dest", type=click.Path(path_type=Path), help="Unpack it there.")
@click.option("--offline", is_flag=True, help="Use only what is in the cache.")
def command(release: str, dest: Path | None, *, offline: bool) -> None:
    """Download a release's sdist from the package index that pip is configured for.

    It is verified against the sha256 that patchkit ships and kept in a cache; prints where it is.
    """
    with progress() as report:
        options = Options(dest=dest, offline=offline, report=report)
        path = fetch_release(release, load_recipe(), options)
        if dest is not None:
            path = unpack(path, dest, progress=report("Unpacking"))
    click.echo(path)
