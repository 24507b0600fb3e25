"""Show every fix and its state in a source, or list the fixes: `patchkit fixes`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

import click
from packaging.version import Version

from patchkit.cli.next_step import next_step, program
from patchkit.cli.options import Selection, opened, optional_source_options, request_options
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
from patchkit.patching.fix import State, Verdict
from patchkit.patching.plan import Plan, make_plan
from patchkit.patching.recipe import load_recipe, load_recipes, load_support
from patchkit.patching.workspace import known_verdicts
from patchkit.source.resolve import SourceOptions
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
        return
    if release:
        raise UsageError("--version is for the list, which takes no SOURCE")
    with opened(source) as (recipe, workspace):
        request = selection.request(workspace.ledger)
        verdicts = known_verdicts(workspace, recipe, request)
        if verdicts is None:
            verdicts = _as_on_disk(make_plan(workspace.tree, recipe, request))
        yield from tree_blocks(workspace, request, fixes=list(map(verdict_fields, verdicts)))
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
        settled(it) if it.edits and {edit.path for edit in it.edits} <= done else it
        for it in plan.verdicts
    )


def _fix_list(version: Version | None, *, verbose: bool) -> Iterator[Block]:
    recipes = list(load_recipes())
    if version is not None:
        # A release that no recipe knows yet is taken for one of vLLM.
        recipe = next((recipe for recipe in recipes if recipe.knows(version)), load_recipe())
        recipe.check(version)
        recipes = [recipe]
        if not recipe.knows(version):
            tell(
                lead_word("note")
                + f"{recipe.project} {version} is not one of the {len(recipe.supported)} known "
                + f"releases, {recipe.supported[0]} to {recipe.newest}: this is what the fixes' "
                + "ranges say, and its code may say otherwise"
            )
    fields, counts = [], Counter[str]()
    tables: dict[str, list[tuple[str, ...]]] = {recipe.project: [] for recipe in recipes}
    for recipe, fix in [(each, fix) for each in recipes for fix in each.fixes]:
        needs = [need for need in fix.needs if version is None or need.covers(version)]
        releases = {
            mode: {name: level for name, level in row.items() if version in (None, Version(name))}
            for mode, row in load_support(recipe.project).get(fix.id, {}).items()
        }
        names = ("id", "title", "layer", "arches", "upstream")
        known = {name: getattr(fix, name) for name in names}
        fields.append({"project": recipe.project, **known, "needs": needs, "releases": releases})
        needed = [
            f"{need.severity.value} {need.versions}" + (f" ({need.limits})" if need.limits else "")
            for need in needs
        ]
        name = style(fix.id, bold=bool(needs) or None, dim=None if needs else True)
        row = (name, fix.title, ", ".join(needed) or "not needed", style(fix.upstream, dim=True))
        if needs or verbose:
            tables[recipe.project].append(row if verbose else row[:3])
        counts.update(need.severity.value for need in needs[:1])
    yield Record(fields)
    for project, rows in tables.items():
        heads = (f"{project} fix", "what it does", "needed", "upstream")
        yield from table(rows, heads=heads if verbose else heads[:3])
    if version is not None:
        yield ", ".join(f"{count} {level}" for level, count in counts.items())
