"""Show every fix and its state: `patchkit status`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import click

from patchkit.cli import show
from patchkit.cli.next_step import next_step, program
from patchkit.cli.options import (
    Selection,
    SourceOptions,
    as_json,
    opened,
    request_options,
    source_options,
)
from patchkit.cli.out import Shown, echo, print_json
from patchkit.errors import DriftError
from patchkit.patching.commit import settled
from patchkit.patching.fix import State, Verdict
from patchkit.patching.plan import Plan, make_plan
from patchkit.patching.workspace import known_verdicts


@click.command()
@source_options
@request_options
@show.verbose
@as_json
def command(source: SourceOptions, *, selection: Selection, verbose: bool, as_json: bool) -> None:
    """Show every fix and its state; write nothing.

    Without options, a patched tree is compared with what it was patched for. Exits with 4 if a fix
    does not fit the code.
    """
    with opened(source) as (recipe, workspace):
        request = selection.request(workspace.ledger)
        verdicts = known_verdicts(workspace, recipe, request)
        if verdicts is None:
            verdicts = _as_on_disk(make_plan(workspace.tree, recipe, request))
        if as_json:
            fields = [show.verdict_fields(verdict) for verdict in verdicts]
            print_json({**show.tree_fields(workspace, request), "fixes": fields})
        else:
            echo([show.header(workspace, request), *show.verdict_lines(verdicts, verbose=verbose)])
            echo([*show.notes(verdicts), *show.bugs(workspace), *_next(verdicts)])
    if any(verdict.state is State.DRIFTED for verdict in verdicts):
        raise SystemExit(DriftError.exit_code)


def _next(verdicts: Sequence[Verdict]) -> Iterator[Shown]:
    """Yield the command that applies what is to apply: the words of this one, but for the verb."""
    states = {verdict.state for verdict in verdicts}
    if State.APPLY in states and State.DRIFTED not in states:
        words = [word for word in sys.argv[1:] if word not in ("status", "-v", "--verbose")]
        yield next_step(*program(), "apply", *words)


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
