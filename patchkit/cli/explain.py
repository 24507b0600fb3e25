"""patchkit explain"""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from patchkit.cli import show
from patchkit.cli.options import as_json
from patchkit.edit.splice import unified_diff
from patchkit.errors import UsageError
from patchkit.patching.fix import Example, Fix
from patchkit.patching.plan import close_to
from patchkit.patching.recipe import load_recipe


@click.command()
@click.argument(
    "fix_id", metavar="ID", shell_complete=lambda *_: [f.id for f in load_recipe().fixes]
)
@as_json
def command(fix_id: str, *, as_json: bool) -> None:
    """One fix: symptom, reason, releases, evidence and its confidence, before and after."""
    recipe = load_recipe()
    fix = recipe.fix(fix_id.replace("-", "_"))
    if fix is None:
        raise UsageError(f"no fix is called {fix_id!r}", hint=close_to(recipe, fix_id))
    if as_json:
        show.print_json(_fields(fix))
        return
    console = show.console()
    console.print(f"[bold]{fix.id}[/]  {fix.title}\n")
    for title, text in (("Symptom", fix.symptom), ("Why", fix.why), ("Upstream", fix.upstream)):
        _section(console, title, text)
    _section(console, "Needed", _needs(fix))
    _section(console, "Evidence", _evidence(fix))
    for example in fix.examples:
        console.print(f"[bold]Before and after[/], as in {example.version}")
        show.print_diff(unified_diff(example.path, example.before, example.after))


def _section(console: Console, title: str, body: str | Table) -> None:
    console.print(f"[bold]{title}[/]")
    console.print(Padding(body, (0, 0, 1, 2), expand=False))


def _needs(fix: Fix) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for need in fix.needs:
        mode = f"--arch {need.arch}" if need.arch else ""
        table.add_row(need.versions, need.severity.value, mode, need.reason)
    return table


def _evidence(fix: Fix) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for evidence in fix.evidence:
        table.add_row(evidence.confidence, evidence.claim, evidence.source)
    return table


def _fields(fix: Fix) -> dict[str, object]:
    return {
        "id": fix.id,
        "title": fix.title,
        "symptom": fix.symptom,
        "why": fix.why,
        "upstream": fix.upstream,
        "needs": [{**asdict(need), "severity": need.severity.value} for need in fix.needs],
        "evidence": [asdict(evidence) for evidence in fix.evidence],
        "requires": list(fix.requires),
        "examples": [_example(example) for example in fix.examples],
    }


def _example(example: Example) -> dict[str, str]:
    return {
        "version": example.version,
        "diff": unified_diff(example.path, example.before, example.after),
    }
