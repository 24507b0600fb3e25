"""List the fixes: `patchkit fixes`."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence

import click
from packaging.version import Version

from patchkit.cli import show
from patchkit.cli.options import as_json
from patchkit.cli.out import Shown, echo, print_json, say, style, table, tell
from patchkit.patching.fix import Fix, Need
from patchkit.patching.recipe import Recipe, load_recipe, load_recipes
from patchkit.patching.support import load_support
from patchkit.source.detect import projects
from patchkit.versions import named_version


@click.command()
@click.option("--version", "wanted", metavar="X.Y.Z", help="What this release needs.")
@click.option("--project", type=click.Choice([*projects()]), help="Only the fixes of one project.")
@show.verbose
@as_json
def command(wanted: str | None, project: str | None, *, verbose: bool, as_json: bool) -> None:
    """List the fixes; with a version, what the table says that release needs."""
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
