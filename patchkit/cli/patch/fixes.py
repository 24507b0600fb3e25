"""Show the fixes, and the state of each in a source: `patchkit fixes`."""

from __future__ import annotations

import difflib
import functools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

import click
from packaging.version import Version

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
from patchkit.cli.out import Shown, echo, print_json, say, style, table, tell
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
@functools.partial(source_options, required=False)
@request_options
@click.option("--version", metavar="X.Y.Z", help="What this release needs, by the table.")
@click.option("--project", type=click.Choice([*projects()]), help="Only the fixes of one project.")
@show.verbose
@as_json
def command(
    source: SourceOptions | None,
    *,
    selection: Selection,
    version: str | None,
    project: str | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Show every fix; of SOURCE, the state of each. Nothing is written.

    Without options, a patched tree is compared with what it was patched for. Exits with 4 if a fix
    does not fit the code. Without SOURCE: the list, and with --version what a release needs.
    """
    if source is None:
        _list_fixes(version, project, verbose=verbose, as_json=as_json)
        return
    if version or project:
        raise UsageError("--version and --project are about the list, and a source is named")
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
            echo([*show.notes(verdicts), *show.bugs(workspace), *_next_steps(verdicts)])
    if any(verdict.state is State.DRIFTED for verdict in verdicts):
        raise SystemExit(DriftError.exit_code)


def _next_steps(verdicts: Sequence[Verdict]) -> Iterator[Shown]:
    """Yield the command that applies what is to apply: the words of this one, but for the verb."""
    states = {verdict.state for verdict in verdicts}
    if State.APPLY in states and State.DRIFTED not in states:
        words = [
            word for word in sys.argv[1:] if word not in ("fixes", "status", "-v", "--verbose")
        ]
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


def _list_fixes(wanted: str | None, project: str | None, *, verbose: bool, as_json: bool) -> None:
    version = named_version(wanted) if wanted else None
    recipes = _recipes(project, version)
    if version is not None and not recipes[0].knows(version):
        tell(show.word("note") + _unknown(recipes[0], version))
    if as_json:
        fixes = [_fields(recipe, fix, version) for recipe in recipes for fix in recipe.fixes]
        print_json(fixes)
        return
    for recipe in recipes:
        echo(_rows(recipe, version, verbose=verbose))
    if version is not None:
        counts = Counter(need.severity.value for need in _needed(recipes[0], version))
        say(", ".join(f"{count} {level}" for level, count in counts.items()))


def _unknown(recipe: Recipe, version: Version) -> str:
    known = recipe.supported
    close = difflib.get_close_matches(str(version), map(str, known), n=1, cutoff=0.7)
    return (
        f"{recipe.project} {version} is not one of the {len(known)} known releases, {known[0]} to "
        f"{recipe.newest}: this is what the fixes' ranges say, and its code may say otherwise"
        + (f"; did you mean {close[0]}?" if close else "")
    )


def _recipes(project: str | None, version: Version | None) -> list[Recipe]:
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


def _rows(recipe: Recipe, version: Version | None, *, verbose: bool) -> Sequence[Shown]:
    heads = (f"{recipe.project} fix", "what it does", "needed", "upstream")
    rows = []
    for fix in recipe.fixes:
        needs = [need for need in fix.needs if version is None or need.covers(version)]
        if needs or verbose:
            named = style(fix.id, bold=bool(needs) or None, dim=None if needs else True)
            needed = ", ".join(map(_need, needs)) or "not needed"
            rows.append((named, fix.title, needed, style(fix.upstream, dim=True)))
    number = 4 if verbose else 3
    return table((row[:number] for row in rows), heads=heads[:number], labels=["upstream"])


def _needed(recipe: Recipe, version: Version) -> list[Need]:
    """Return the first need of each fix that a release needs."""
    covering = ([need for need in fix.needs if need.covers(version)] for fix in recipe.fixes)
    return [needs[0] for needs in covering if needs]


def _need(need: Need) -> str:
    only = f" ({need.limits})" if need.limits else ""
    return f"{need.severity.value} {need.versions}{only}"


def _fields(recipe: Recipe, fix: Fix, version: Version | None) -> dict[str, object]:
    return {
        "id": fix.id,
        "project": recipe.project,
        "title": fix.title,
        "layer": fix.layer,
        "arches": list(fix.arches),
        "upstream": fix.upstream,
        "needs": [
            {
                "versions": need.versions,
                "severity": need.severity.value,
                "reason": need.reason,
                "arch": need.arch or None,
                "kind": need.kind or None,
            }
            for need in fix.needs
            if version is None or need.covers(version)
        ],
        "releases": {
            mode: {
                release: level.value
                for release, level in row.items()
                if version is None or release == str(version)
            }
            for mode, row in load_support(recipe.project).get(fix.id, {}).items()
        },
    }
