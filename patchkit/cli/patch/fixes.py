"""Show every fix and its state in a source, or list the fixes: `patchkit fixes`."""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

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
from patchkit.cli.out import Shown, style, table, tell
from patchkit.cli.patch.verdict_view import (
    note_lines,
    tree_fields,
    tree_header,
    verdict_fields,
    verdict_lines,
)
from patchkit.cli.render import Block, ExitCode, Record, lead_word, rendered, verbose_option
from patchkit.errors import DriftError, UsageError
from patchkit.patching.commit import settled
from patchkit.patching.fix import Fix, Need, State, Verdict
from patchkit.patching.plan import Plan, make_plan
from patchkit.patching.recipe import Recipe, load_recipe, load_recipes
from patchkit.patching.support import load_support
from patchkit.patching.workspace import known_verdicts
from patchkit.source.detect import projects
from patchkit.versions import named_version


@click.command()
@optional_source_options
@request_options
@click.option("--version", "release", metavar="X.Y.Z", help="List what this release needs.")
@click.option("--project", type=click.Choice([*projects()]), help="List the fixes of one project.")
@verbose_option
@rendered
def command(
    source: SourceOptions | None,
    *,
    selection: Selection,
    release: str | None,
    project: str | None,
    verbose: bool,
) -> Iterator[Block]:
    """Show every fix and its state in SOURCE; write nothing. Without SOURCE, list the fixes.

    Without options, a patched tree is compared with what it was patched for. Exits with 4 if a fix
    does not fit the code.

    The list says how much a release needs each fix, by the table; the code of SOURCE decides.
    """
    if source is None:
        yield from _fix_list(project, named_version(release) if release else None, verbose=verbose)
    elif release or project:
        raise UsageError("--version and --project are for the list, which takes no SOURCE")
    else:
        yield from _fix_states(source, selection, verbose=verbose)


def _fix_states(source: SourceOptions, selection: Selection, *, verbose: bool) -> Iterator[Block]:
    with opened(source) as (recipe, workspace):
        request = selection.request(workspace.ledger)
        verdicts = known_verdicts(workspace, recipe, request)
        if verdicts is None:
            verdicts = _as_on_disk(make_plan(workspace.tree, recipe, request))
        fixes = [verdict_fields(verdict) for verdict in verdicts]
        yield Record({**tree_fields(workspace, request), "fixes": fixes})
        yield tree_header(workspace, request)
        yield from verdict_lines(verdicts, verbose=verbose)
        yield from note_lines(verdicts, workspace)
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
    done = set()
    for path, (_before, after) in plan.texts.items():
        if (plan.stock.root / path).is_file() and plan.stock.read_bytes(path).decode() == after:
            done.add(path)
    return tuple(
        settled(verdict)
        if verdict.edits and {edit.path for edit in verdict.edits} <= done
        else verdict
        for verdict in plan.verdicts
    )


def _fix_list(project: str | None, version: Version | None, *, verbose: bool) -> Iterator[Block]:
    recipes = _listed_recipes(project, version)
    if version is not None and not recipes[0].knows(version):
        tell(lead_word("note") + _unknown_release(recipes[0], version))
    yield Record(
        [_listed_fields(recipe, fix, version) for recipe in recipes for fix in recipe.fixes]
    )
    for recipe in recipes:
        yield from _fix_rows(recipe, version, verbose=verbose)
    if version is not None:
        needs = [_needs(fix, version)[:1] for fix in recipes[0].fixes]
        counts = Counter(need.severity.value for first in needs for need in first)
        yield ", ".join(f"{count} {level}" for level, count in counts.items())


def _listed_recipes(project: str | None, version: Version | None) -> list[Recipe]:
    """Return one project's recipe, or all; a version alone is of the project that knows it."""
    if project is not None:
        recipes = [load_recipe(project)]
    elif version is None:
        recipes = list(load_recipes())
    else:
        known = [recipe for recipe in load_recipes() if recipe.knows(version)]
        # A release that no recipe knows yet is taken for one of vLLM.
        recipes = known[:1] or [load_recipe()]
    if version is not None:
        recipes[0].check(version)
    return recipes


def _unknown_release(recipe: Recipe, version: Version) -> str:
    known = recipe.supported
    close = difflib.get_close_matches(str(version), map(str, known), n=1, cutoff=0.7)
    return (
        f"{recipe.project} {version} is not one of the {len(known)} known releases, {known[0]} to "
        f"{recipe.newest}: this is what the fixes' ranges say, and its code may say otherwise"
        + (f"; did you mean {close[0]}?" if close else "")
    )


def _needs(fix: Fix, version: Version | None) -> list[Need]:
    return [need for need in fix.needs if version is None or need.covers(version)]


def _fix_rows(recipe: Recipe, version: Version | None, *, verbose: bool) -> Sequence[Shown]:
    heads = (f"{recipe.project} fix", "what it does", "needed", "upstream")
    number = 4 if verbose else 3
    rows = []
    for fix in recipe.fixes:
        needs = _needs(fix, version)
        if not needs and not verbose:
            continue
        needed = [
            f"{need.severity.value} {need.versions}" + (f" ({need.limits})" if need.limits else "")
            for need in needs
        ]
        name = style(fix.id, bold=bool(needs) or None, dim=None if needs else True)
        upstream = style(fix.upstream, dim=True)
        rows.append((name, fix.title, ", ".join(needed) or "not needed", upstream)[:number])
    return table(rows, heads=heads[:number])


def _listed_fields(recipe: Recipe, fix: Fix, version: Version | None) -> dict[str, object]:
    support = load_support(recipe.project).get(fix.id, {})
    return {
        "id": fix.id,
        "project": recipe.project,
        "title": fix.title,
        "layer": fix.layer,
        "arches": fix.arches,
        "upstream": fix.upstream,
        "needs": _needs(fix, version),
        "releases": {
            mode: {
                release: level
                for release, level in row.items()
                if version is None or release == str(version)
            }
            for mode, row in support.items()
        },
    }
