"""Patch a tree: `patchkit apply`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from patchkit.apply import apply
from patchkit.cli.next_step import next_step, program
from patchkit.cli.options import Selection, located, request_options, source_options
from patchkit.cli.out import LaidOut, style
from patchkit.cli.patch.verdict_view import (
    proof_lines,
    tree_blocks,
    verdict_fields,
    verdict_lines,
    verdict_notes,
)
from patchkit.cli.render import GOOD, Block, counted_noun, rendered, verbose_option
from patchkit.patching.commit import Applied
from patchkit.patching.fix import Request
from patchkit.patching.ledger import read_ledger
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import Workspace, open_workspace
from patchkit.quoting import quoted
from patchkit.source.detect import detect, state_folder
from patchkit.source.resolve import SourceOptions

_EPILOG = """\
\b
Examples:
  patchkit apply vllm==0.24.0
  patchkit apply .venv/lib/python3.12/site-packages/vllm
"""


@click.command(epilog=_EPILOG)
@source_options
@request_options
@click.option("--dry-run", is_flag=True, help="Plan and prove, write nothing.")
@verbose_option
@rendered
def command(
    source: SourceOptions, *, selection: Selection, dry_run: bool, verbose: bool
) -> Iterator[Block]:
    """Patch a tree for a device, prove the effect, and keep a way back.

    What is asked for is what the tree becomes, whatever was applied before; asking again changes
    nothing. Either everything is written or nothing.

    Of an installed package that is patched already, which a repacked wheel gives, what it was
    patched for is the default.
    """
    recipe = load_recipe(source.project)
    selection.request()  # a mistyped option is reported before anything is fetched
    with located(source, keep=not dry_run) as (path, sandboxed):
        tree = detect(path, recipe.project)
        # The maker of an installed package's wheel may have chosen fixes.
        kept = tree.kind == "installed"
        ledger = read_ledger(state_folder(tree), recipe.project) if kept else None
        request = selection.request(ledger)
        outcome = apply(path, recipe, request, dry_run=dry_run, sandboxed=sandboxed)
        # Opened once more: what is shown is what lies on the disk now.
        workspace = open_workspace(path, recipe.project)
        yield from tree_blocks(
            workspace,
            request,
            dry_run=dry_run,
            fixes=list(map(verdict_fields, outcome.verdicts)),
            proofs=outcome.proofs,
            recorded_proofs=outcome.recorded_proofs,
            recorded_by=outcome.recorded_by or None,
            written=outcome.written,
        )
        yield from verdict_lines(outcome.verdicts, verbose=verbose)
        yield from verdict_notes(outcome.verdicts, workspace)
        yield from proof_lines(outcome.proofs, verbose=verbose)
        if proofs := outcome.recorded_proofs:
            said = f"recorded as proved by {outcome.recorded_by}, not proved again:"
            yield style(said, fg="cyan") + ("" if verbose else f" {len(proofs)} effects")
            yield from (f"  {proof}" for proof in proofs if verbose)
        if ledger and not selection.chooses:
            yield "as the package was patched before; name fixes, or revert first, for others"
        yield from _ending(path, workspace, request, outcome, dry_run=dry_run)


def _ending(
    path: Path, workspace: Workspace, request: Request, outcome: Applied, *, dry_run: bool
) -> Iterator[str]:
    """Yield what was done, how to take it back, and the next command."""
    project, target = workspace.tree.project, request.target
    if dry_run:
        files = sum(line.startswith("diff --git") for line in outcome.diff.splitlines())
        yield f"dry run: {counted_noun(files, 'file')} would change"
        if files:
            yield next_step(*program(), *(word for word in sys.argv[1:] if word != "--dry-run"))
        return
    if outcome.written:
        yield GOOD + f"{counted_noun(len(outcome.written), 'file')} changed in {path}"
        undo = quoted(*program(), "revert", f"--{project}-src", path)
        yield LaidOut(style("undo:", bold=True) + f" {undo}")
    else:
        yield "nothing to do: the tree is as asked for"
    if workspace.tree.kind == "installed":
        return
    yield f"a build of your own takes {load_recipe(project).build.setting(request)}"
    options = {"--target": [target.name] if target.name != "gb10" else []}
    if project != "nccl":  # which is cross-compiled, with all of its fixes
        options["--arch"] = [request.arch] if request.arch != "native" else []
        fixes = {"--only": request.only, "--without": request.skip, "--with": request.also}
        options |= {option: sorted(ids) for option, ids in fixes.items()}
    words = [word for option, values in options.items() for it in values for word in (option, it)]
    yield next_step(*program(), "build", project, "--src", path, *words)
