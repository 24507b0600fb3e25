"""Write the fixes as a patch series: `patchkit series`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from patchkit.apply import plan_for
from patchkit.cli.options import Selection, SourceOptions, opened, request_options, source_options
from patchkit.cli.render import Block, Data, Record, rendered
from patchkit.durable.failure import translated
from patchkit.errors import UsageError
from patchkit.patching.series import patch_series


@click.command()
@source_options
@request_options
@click.option(
    *("-o", "--output"),
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the series.",
)
@rendered
def command(source: SourceOptions, *, selection: Selection, output: Path) -> Iterator[Block]:
    """Write the fixes as a series that git am takes: a patch per fix, with reasons and evidence."""
    with opened(source) as (recipe, workspace):
        mails = patch_series(plan_for(workspace, recipe, selection.request(workspace.ledger)))
    with translated(at=output):
        output.mkdir(parents=True, exist_ok=True)
        # `git am *.patch` would take it along.
        if stale := sorted(p.name for p in output.glob("*.patch") if p.name not in mails):
            what = f"{output}: holds {stale[0]}, which is not of this series"
            raise UsageError(what, hint="name an empty folder")
        for name, mail in mails.items():
            (output / name).write_text(mail, encoding="utf-8")
    paths = [output / name for name in mails]
    yield Record({"patches": paths})
    yield Data("".join(f"{path}\n" for path in paths))
