"""patchkit revert"""

from __future__ import annotations

from pathlib import Path

import click

from patchkit.apply import revert
from patchkit.cli.options import Source, as_json, folder_options


@click.command()
@folder_options
@as_json
def command(source: Source, *, as_json: bool) -> None:
    """Put back what upstream shipped, byte by byte.

    Refuses, and names the file, if a patched file was edited since.
    """
    restored = revert(Path(source.spec), source.project)
    if as_json:
        from patchkit.cli import show

        show.print_json({"restored": list(restored)})
    else:
        click.echo(f"{len(restored)} files are as upstream shipped them")
