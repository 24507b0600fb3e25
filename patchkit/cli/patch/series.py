"""Write the fixes as a patch series: `patchkit series`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from patchkit.apply import plan_for
from patchkit.cli.next_step import next_step
from patchkit.cli.options import (
    STDOUT,
    Selection,
    SourceOptions,
    opened,
    request_options,
    source_options,
)
from patchkit.cli.out import LaidOut, tell
from patchkit.cli.render import Block, Data, Record, rendered
from patchkit.patching.export import mailbox, write_series


@click.command()
@source_options
@request_options
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder of the series; -: one mailbox on standard output.",
)
@rendered
def command(source: SourceOptions, *, selection: Selection, output: Path) -> Iterator[Block]:
    """Write the fixes as a series that git am takes: a patch per fix, with reasons and evidence."""
    with opened(source) as (recipe, workspace):
        plan = plan_for(workspace, recipe, selection.request(workspace.ledger))
        if output == STDOUT:
            text = mailbox(plan)
            yield Record({"mailbox": text})
            yield Data(text)
            return
        paths = write_series(plan, output)
        yield Record({"patches": paths})
        yield Data("".join(f"{path}\n" for path in paths))
        tree = workspace.tree
        where = f"in a checkout of {tree.project} {tree.version}"
        tell(LaidOut(next_step("git", "am", output.absolute(), where=where) + "/*.patch"))
