"""patchkit fixes"""

from __future__ import annotations

import click
from packaging.version import InvalidVersion, Version
from rich.table import Table
from rich.text import Text

from patchkit.cli import show
from patchkit.cli.options import as_json
from patchkit.errors import UsageError
from patchkit.patching.fix import Fix, Need
from patchkit.patching.recipe import Recipe, load_recipe
from patchkit.patching.support import load_support


@click.command()
@click.option("--version", "wanted", metavar="X.Y.Z", help="What this release needs.")
@as_json
def command(wanted: str | None, *, as_json: bool) -> None:
    """The catalogue of fixes; with a version, what the table says that release needs."""
    recipe = load_recipe()
    version = _version(wanted, recipe) if wanted else None
    if as_json:
        show.print_json([_fields(fix, version) for fix in recipe.fixes])
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("fix", no_wrap=True, style="bold")
    table.add_column("needed" if version is None else f"in {version}", overflow="fold")
    table.add_column("what it does", overflow="fold")
    table.add_column("upstream", overflow="fold", style="dim")
    for fix in recipe.fixes:
        needs = [need for need in fix.needs if version is None or need.covers(version)]
        quiet = "" if needs else "dim"
        table.add_row(Text(fix.id, quiet), _needs(needs), Text(fix.title, quiet), fix.upstream)
    show.console().print(table)


def _version(text: str, recipe: Recipe) -> Version:
    try:
        version = Version(text)
    except InvalidVersion:
        raise UsageError(f"{text!r} is not a version") from None
    recipe.check(version)
    return version


def _needs(needs: list[Need]) -> str:
    return "\n".join(_need(need) for need in needs) or "-"


def _need(need: Need) -> str:
    only = f" ({need.limits})" if need.limits else ""
    return f"{need.severity.value} {need.versions}{only}"


def _fields(fix: Fix, version: Version | None) -> dict[str, object]:
    return {
        "id": fix.id,
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
            for mode, row in load_support()[fix.id].items()
        },
    }
