"""Show what apply would change, or did: `patchkit diff`."""

from __future__ import annotations

import click

from patchkit.apply import plan_for
from patchkit.cli import show
from patchkit.cli.options import Selection, SourceOptions, opened, request_options, source_options


@click.command()
@source_options
@request_options
def command(source: SourceOptions, *, selection: Selection) -> None:
    """Show what apply would change, or did: a unified diff that git apply takes."""
    with opened(source) as (recipe, workspace):
        plan = plan_for(workspace, recipe, selection.request(workspace.ledger))
        show.print_diff(plan.diff())
