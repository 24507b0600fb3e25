"""patchkit export"""

from __future__ import annotations

from pathlib import Path

import click

from patchkit.apply import plan_for
from patchkit.cli.options import Selection, Source, opened, request_options, source_options
from patchkit.cli.out import data
from patchkit.patching.export import write_series


@click.command()
@source_options
@request_options
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder of the series."
)
def command(source: Source, *, selection: Selection, output: Path) -> None:
    """The fixes as a series that git am takes: one patch per fix, reasons and evidence on top."""
    with opened(source) as (recipe, workspace):
        plan = plan_for(workspace, recipe, selection.request(workspace.ledger))
        for path in write_series(plan, output):
            data(f"{path}\n")
