"""patchkit revert"""

from __future__ import annotations

from pathlib import Path

import click

from patchkit.apply import revert
from patchkit.cli.options import as_json


@click.command()
@click.option(
    "--vllm-src",
    "source",
    required=True,
    type=click.Path(path_type=Path),
    help="The folder that was patched.",
)
@as_json
def command(source: Path, *, as_json: bool) -> None:
    """Put back what upstream shipped, byte by byte.

    Refuses, and names the file, if a patched file was edited since.
    """
    restored = revert(source)
    if as_json:
        from patchkit.cli import show

        show.print_json({"restored": list(restored)})
    else:
        click.echo(f"{len(restored)} files are as upstream shipped them")
