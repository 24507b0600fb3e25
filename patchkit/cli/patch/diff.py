"""Show what apply would change, or did: `patchkit diff`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from patchkit.apply import plan_for
from patchkit.cli.options import Selection, SourceOptions, opened, request_options, source_options
from patchkit.cli.patch.verdict_view import diff_blocks
from patchkit.cli.render import Block, Record, rendered


@click.command()
@source_options
@request_options
@rendered
def command(source: SourceOptions, *, selection: Selection) -> Iterator[Block]:
    """Show what apply would change, or did: a unified diff that git apply takes."""
    with opened(source) as (recipe, workspace):
        plan = plan_for(workspace, recipe, selection.request(workspace.ledger))
        tree, diff = workspace.tree, plan.diff()
        release = {"project": tree.project, "version": tree.version}
        yield Record({**release, "files": [*plan.texts], "diff": diff})
        yield from diff_blocks(diff)
