"""Put back what upstream shipped: `patchkit revert`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from patchkit.apply import revert, revert_by_force
from patchkit.cli.options import SourceOptions, folder_options
from patchkit.cli.render import Block, Record, rendered
from patchkit.source.resolve import patched_tree


@click.command()
@folder_options
@click.option(
    "--force",
    is_flag=True,
    help="Put the originals back though files were edited, or what patchkit keeps is damaged; "
    "what is in the way is moved aside.",
)
@rendered
def command(source: SourceOptions, *, force: bool) -> Iterator[Block]:
    """Put back what upstream shipped, byte by byte.

    SOURCE is the folder, or the release that `apply` unpacked and patched below build/. Refuses,
    and names the file, if a patched file was edited since.
    """
    path = patched_tree(source.spec, source.project)
    if not force:
        restored = revert(path, source.project)
        yield Record({"restored": restored})
        done = f"{len(restored)} files are as upstream shipped them"
        yield done if restored else "nothing to do: patchkit has changed nothing here"
        return
    rescued = revert_by_force(path, source.project)
    yield Record(rescued)
    yield f"{len(rescued.restored)} files are as upstream shipped them"
    if rescued.moved:
        yield f"moved to {rescued.aside}: {', '.join(rescued.moved)}"
    if rescued.lost:
        yield f"not restored, as the original is damaged: {', '.join(rescued.lost)}"
    if not rescued.created:
        yield "no ledger says which files patchkit created: those stay where they are"
