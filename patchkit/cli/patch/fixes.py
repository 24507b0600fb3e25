"""List the fixes: `patchkit fixes`."""

from __future__ import annotations

import click
from packaging.version import Version
from rich.table import Table

from patchkit.cli import show
from patchkit.cli.options import as_json
from patchkit.cli.out import print_json
from patchkit.patching.fix import Fix, Need
from patchkit.patching.recipe import Recipe, load_recipe, load_recipes
from patchkit.patching.support import load_support
from patchkit.source.detect import projects
from patchkit.versions import named_version


@click.command()
@click.option("--version", "wanted", metavar="X.Y.Z", help="What this release needs.")
@click.option("--project", type=click.Choice([*projects()]), help="Only the fixes of one project.")
@as_json
def command(wanted: str | None, project: str | None, *, as_json: bool) -> None:
    """List the fixes; with a version, what the table says that release needs."""
    version = named_version(wanted) if wanted else None
    recipes = _recipes(project, version)
    if as_json:
        fixes = [_fields(recipe, fix, version) for recipe in recipes for fix in recipe.fixes]
        print_json(fixes)
        return
    for recipe in recipes:
        show.console().print(_table(recipe, version))


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


def _table(recipe: Recipe, version: Version | None) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(f"{recipe.project} fix", no_wrap=True, style="bold")
    table.add_column("needed" if version is None else f"in {version}", overflow="fold")
    table.add_column("what it does", overflow="fold")
    table.add_column("upstream", overflow="fold", style="dim")
    for fix in recipe.fixes:
        needs = [need for need in fix.needs if version is None or need.covers(version)]
        quiet = "" if needs else "dim"
        name, title = (show.text(each, style=quiet) for each in (fix.id, fix.title))
        table.add_row(name, _needs(needs), title, fix.upstream)
    return table


def _needs(needs: list[Need]) -> str:
    return "\n".join(_need(need) for need in needs) or "-"


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
