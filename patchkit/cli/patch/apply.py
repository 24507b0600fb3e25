"""Patch a tree: `patchkit apply`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from patchkit.apply import apply
from patchkit.cli import show
from patchkit.cli.options import (
    Selection,
    SourceOptions,
    as_json,
    located,
    request_options,
    source_options,
)
from patchkit.cli.out import print_json
from patchkit.patching.commit import Applied
from patchkit.patching.fix import Request
from patchkit.patching.ledger import Ledger, read_ledger
from patchkit.patching.recipe import Recipe, load_recipe
from patchkit.patching.workspace import open_workspace
from patchkit.quoting import quoted
from patchkit.source.detect import detect, state_folder

_EPILOG = """\
\b
Examples:
  patchkit apply vllm==0.24.0
  patchkit apply ~/src/vllm --arch family --dry-run
  patchkit apply .venv/lib/python3.12/site-packages/vllm
  patchkit apply nccl==2.29.7 --dest build/nccl-2.29.7
"""


@click.command(epilog=_EPILOG)
@source_options
@request_options
@click.option("--dry-run", is_flag=True, help="Plan and prove, write nothing.")
@as_json
def command(
    source: SourceOptions,
    *,
    selection: Selection,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Patch a tree for a device, prove the effect, and keep a way back.

    What is asked for is what the tree becomes, whatever was applied before; asking again changes
    nothing. Either everything is written or nothing.

    Of an installed package that is patched already, which a repacked wheel gives, what it was
    patched for is the default.
    """
    recipe = load_recipe(source.project)
    selection.request()  # a mistyped option is reported before anything is fetched
    with located(source, keep=not dry_run) as (path, sandboxed):
        ledger = _kept(path, recipe.project)
        request = selection.request(ledger)
        outcome = apply(path, recipe, request, dry_run=dry_run, sandboxed=sandboxed)
        _print(path, recipe, request, outcome, dry_run=dry_run, as_json=as_json)
        if ledger and not selection.chooses and not as_json:
            _tell_kept(request)


def _kept(path: Path, project: str) -> Ledger | None:
    """Return the ledger of an installed package: the maker of its wheel may have chosen fixes."""
    tree = detect(path, project)
    return read_ledger(state_folder(tree), project) if tree.kind == "installed" else None


def _tell_kept(request: Request) -> None:
    fixes = (("only", request.only), ("without", request.skip), ("with", request.also))
    chosen = [f"--{option} {fix_id}" for option, ids in fixes for fix_id in sorted(ids)]
    if chosen:
        show.console().print(
            f"kept, as the package was patched before: {' '.join(chosen)}; "
            "name fixes, or revert first, for others",
            soft_wrap=True,
        )


def _print(
    path: Path, recipe: Recipe, request: Request, outcome: Applied, *, dry_run: bool, as_json: bool
) -> None:
    # Opened once more: what is shown is what lies on the disk now.
    workspace = open_workspace(path, recipe.project)
    if as_json:
        fields: dict[str, Any] = {
            **show.tree_fields(workspace, request),
            "dry_run": dry_run,
            "fixes": [show.verdict_fields(verdict) for verdict in outcome.verdicts],
            "proofs": list(outcome.proofs),
            "recorded_proofs": list(outcome.recorded_proofs),
            "recorded_by": outcome.recorded_by or None,
            "written": list(outcome.written),
        }
        print_json(fields)
        return
    console = show.console()
    console.print(show.header(workspace, request))
    console.print(show.verdict_table(outcome.verdicts))
    for line in [
        *show.notes(outcome.verdicts),
        *show.bugs(workspace),
        *show.proof_lines(outcome.proofs),
        *show.recorded_lines(outcome),
    ]:
        console.print(line)
    console.print(_summary(path, recipe.project, outcome, dry_run=dry_run), soft_wrap=True)
    if workspace.tree.kind != "installed" and not dry_run:
        console.print(f"build with {recipe.build.setting(request)}", style="bold")


def _summary(path: Path, project: str, outcome: Applied, *, dry_run: bool) -> str:
    if dry_run:
        files = sum(line.startswith("diff --git") for line in outcome.diff.splitlines())
        return f"dry run: {files} files would change; patchkit diff shows how"
    if not outcome.written:
        return "nothing to do: the tree is as asked for"
    count = len(outcome.written)
    return (
        f"{count} file{'' if count == 1 else 's'} changed; see the change with patchkit diff, "
        f"undo it with {quoted('patchkit', 'revert', f'--{project}-src', path)}"
    )
