"""Show what apply would change, or did: `patchkit diff`."""

from __future__ import annotations

import click

from patchkit.apply import plan_for
from patchkit.cli import show
from patchkit.cli.options import (
    Selection,
    SourceOptions,
    as_json,
    opened,
    request_options,
    source_options,
)
from patchkit.cli.out import print_json


@click.command()
@source_options
@request_options
@as_json
def command(source: SourceOptions, *, selection: Selection, as_json: bool) -> None:
    """Show what apply would change, or did: a unified diff that git apply takes."""
    with opened(source) as (recipe, workspace):
        plan = plan_for(workspace, recipe, selection.request(workspace.ledger))
        if as_json:
            tree = workspace.tree
            about = {"project": tree.project, "version": str(tree.version)}
            print_json({**about, "files": [*plan.texts], "diff": plan.diff()})
        else:
            show.print_diff(plan.diff())
