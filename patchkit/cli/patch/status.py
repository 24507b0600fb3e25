"""Show every fix and its state: `patchkit status`."""

from __future__ import annotations

import click

from patchkit.cli.options import (
    Selection,
    SourceOptions,
    as_json,
    opened,
    request_options,
    source_options,
)
from patchkit.cli.out import print_json
from patchkit.errors import DriftError
from patchkit.patching.commit import settled
from patchkit.patching.fix import State, Verdict
from patchkit.patching.plan import Plan, make_plan
from patchkit.patching.workspace import known_verdicts


@click.command()
@source_options
@request_options
@as_json
def command(source: SourceOptions, *, selection: Selection, as_json: bool) -> None:
    """Show every fix and its state; write nothing.

    Without options, a patched tree is compared with what it was patched for. Exits with 4 if a fix
    does not fit the code.
    """
    with opened(source) as (recipe, workspace):
        request = selection.request(workspace.ledger)
        verdicts = known_verdicts(workspace, recipe, request)
        if verdicts is None:
            verdicts = _as_on_disk(make_plan(workspace.tree, recipe, request))
        from patchkit.cli import show

        if as_json:
            fields = [show.verdict_fields(verdict) for verdict in verdicts]
            print_json({**show.tree_fields(workspace, request), "fixes": fields})
        else:
            console = show.console()
            console.print(show.header(workspace, request))
            console.print(show.verdict_table(verdicts))
            for line in [*show.notes(verdicts), *show.bugs(workspace)]:
                console.print(line, soft_wrap=True)
    if any(verdict.state is State.DRIFTED for verdict in verdicts):
        raise SystemExit(DriftError.exit_code)


def _as_on_disk(plan: Plan) -> tuple[Verdict, ...]:
    """Return verdicts, made of upstream's texts, with what lies on disk already as applied."""
    done = {path for path, (_b, after) in plan.texts.items() if _on_disk(plan, path) == after}
    return tuple(
        settled(v) if v.edits and {edit.path for edit in v.edits} <= done else v
        for v in plan.verdicts
    )


def _on_disk(plan: Plan, path: str) -> str | None:
    there = (plan.stock.root / path).is_file()
    return plan.stock.read_bytes(path).decode() if there else None
