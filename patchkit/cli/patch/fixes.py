"""Show every fix and its state in a source, or list the fixes: `patchkit fixes`."""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from collections.abc import Iterator

import click
from packaging.version import Version

from patchkit.cli.next_step import next_step, program
from patchkit.cli.options import (
    Selection,
    SourceOptions,
    opened,
    optional_source_options,
    request_options,
)
from patchkit.cli.out import style, table, tell
from patchkit.cli.patch.verdict_view import (
    tree_blocks,
    verdict_fields,
    verdict_lines,
    verdict_notes,
)
from patchkit.cli.render import Block, ExitCode, Record, lead_word, rendered, verbose_option
from patchkit.errors import DriftError, UsageError
from patchkit.patching.commit import settled
from patchkit.patching.fix import Fix, Need, State, Verdict
from patchkit.patching.plan import Plan, make_plan
from patchkit.patching.recipe import Recipe, load_recipe, load_recipes
from patchkit.patching.support import load_support
from patchkit.patching.workspace import known_verdicts
from patchkit.versions import named_version


@click.command()
@optional_source_options
@request_options
@click.option("--version", "release", metavar="X.Y.Z", help="List what this release needs.")
@verbose_option
@rendered
def command(
    source: SourceOptions | None, *, selection: Selection, release: str | None, verbose: bool
) -> Iterator[Block]:
    """Show every fix and its state in SOURCE; write nothing. Without SOURCE, list the fixes.

    Without options, a patched tree is compared with what it was patched for. Exits with 4 if a fix
    does not fit the code.

    The list says how much a release needs each fix, by the table; the code of SOURCE decides.
    """
    if source is None:
        yield from _fix_list(named_version(release) if release else None, verbose=verbose)
    elif release:
        raise UsageError("--version is for the list, which takes no SOURCE")
    else:
        yield from _fix_states(source, selection, verbose=verbose)


def _fix_states(source: SourceOptions, selection: Selection, *, verbose: bool) -> Iterator[Block]:
    with opened(source) as (recipe, workspace):
        request = selection.request(workspace.ledger)
        verdicts = known_verdicts(workspace, recipe, request)
        if verdicts is None:
            verdicts = _as_on_disk(make_plan(workspace.tree, recipe, request))
        fields = [verdict_fields(verdict) for verdict in verdicts]
        yield from tree_blocks(workspace, request, fixes=fields)
        yield from verdict_lines(verdicts, verbose=verbose)
        yield from verdict_notes(verdicts, workspace)
    states = {verdict.state for verdict in verdicts}
    if State.DRIFTED in states:
        yield ExitCode(DriftError.exit_code)
    elif State.APPLY in states:
        # `status SOURCE` is the former spelling.
        left_out = ("fixes", "status", "-v", "--verbose")
        words = [word for word in sys.argv[1:] if word not in left_out]
        yield next_step(*program(), "apply", *words)


def _as_on_disk(plan: Plan) -> tuple[Verdict, ...]:
    """Return verdicts, made of upstream's texts, with what lies on disk already as applied."""
    done = {
        path
        for path, (_before, after) in plan.texts.items()
        if (plan.stock.root / path).is_file() and plan.stock.read_bytes(path).decode() == after
    }
    return tuple(
        settled(verdict)
        if verdict.edits and {edit.path for edit in verdict.edits} <= done
        else verdict
        for verdict in plan.verdicts
    )


def _fix_list(version: Version | None, *, verbose: bool) -> Iterator[Block]:
    recipes = list(load_recipes())
    if version is not None:
        # A release that no recipe knows yet is taken for one of vLLM.
        recipe = next((recipe for recipe in recipes if recipe.knows(version)), load_recipe())
        recipe.check(version)
        recipes = [recipe]
        if not recipe.knows(version):
            close = difflib.get_close_matches(str(version), map(str, recipe.supported), cutoff=0.7)
            tell(
                lead_word("note")
                + f"{recipe.project} {version} is not one of the {len(recipe.supported)} known "
                + f"releases, {recipe.supported[0]} to {recipe.newest}: this is what the fixes' "
                + "ranges say, and its code may say otherwise"
                + (f"; did you mean {close[0]}?" if close else "")
            )
    needs = {
        fix.id: [need for need in fix.needs if version is None or need.covers(version)]
        for recipe in recipes
        for fix in recipe.fixes
    }
    fixes = [(recipe, fix) for recipe in recipes for fix in recipe.fixes]
    yield Record([_listed_fields(recipe, fix, needs[fix.id], version) for recipe, fix in fixes])
    for recipe in recipes:
        rows = [_fix_row(fix, needs[fix.id]) for fix in recipe.fixes if needs[fix.id] or verbose]
        heads = (f"{recipe.project} fix", "what it does", "needed", "upstream")
        columns = 4 if verbose else 3
        yield from table((row[:columns] for row in rows), heads=heads[:columns])
    if version is not None:
        counts = Counter(found[0].severity.value for found in needs.values() if found)
        yield ", ".join(f"{count} {level}" for level, count in counts.items())


def _fix_row(fix: Fix, needs: list[Need]) -> tuple[str, ...]:
    needed = [
        f"{need.severity.value} {need.versions}" + (f" ({need.limits})" if need.limits else "")
        for need in needs
    ]
    name = style(fix.id, bold=bool(needs) or None, dim=None if needs else True)
    return name, fix.title, ", ".join(needed) or "not needed", style(fix.upstream, dim=True)


def _listed_fields(
    recipe: Recipe, fix: Fix, needs: list[Need], version: Version | None
) -> dict[str, object]:
    releases = {
        mode: {name: level for name, level in row.items() if version in (None, Version(name))}
        for mode, row in load_support(recipe.project).get(fix.id, {}).items()
    }
    names = ("id", "title", "layer", "arches", "upstream")
    known = {name: getattr(fix, name) for name in names}
    return {"project": recipe.project, **known, "needs": needs, "releases": releases}
