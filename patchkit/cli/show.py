"""Tables for people and JSON for machines, of the same things."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from patchkit.apply import Workspace
from patchkit.patching.fix import Request, State, Verdict
from patchkit.patching.recipe import load_recipe

STYLES = {
    State.APPLY: ("→", "yellow"),
    State.APPLIED: ("✓", "green"),
    State.UPSTREAM: ("=", "cyan"),
    State.NOT_APPLICABLE: ("·", "dim"),
    State.OFF: ("○", "dim"),
    State.DRIFTED: ("✗", "bold red"),
}

_DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def console() -> Console:
    """Standard output; without a terminal: no colour, and wide enough not to cut paths."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=160)


def header(workspace: Workspace, request: Request) -> Text:
    """One line: what is patched, and for what."""
    tree, target = workspace.tree, request.target
    return Text.assemble(
        (f"{tree.project} {tree.version}", "bold"),
        f"  {tree.kind}  →  {target.title}, {request.arch} ",
        (load_recipe(tree.project).build.value_for(request), "bold"),
    )


def verdict_table(verdicts: Iterable[Verdict]) -> Table:
    """A row per fix."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("", "fix", "state", "severity"):
        table.add_column(column, no_wrap=True)
    table.add_column("what the code says", overflow="fold")
    for verdict in verdicts:
        sign, style = STYLES[verdict.state]
        needed = verdict.state not in (State.UPSTREAM, State.NOT_APPLICABLE)
        severity = verdict.severity.value if verdict.severity and needed else ""
        quiet = verdict.state in (State.NOT_APPLICABLE, State.OFF)
        table.add_row(
            Text(sign, style),
            Text(verdict.fix.id, "dim" if quiet else ""),
            Text(verdict.state.value, style),
            Text(severity, "dim" if quiet else ""),
            Text(verdict.reason, "dim"),
        )
    return table


def notes(verdicts: Iterable[Verdict]) -> list[Text]:
    """What verdicts have to add, each thing once."""
    found = dict.fromkeys(verdict.note for verdict in verdicts if verdict.note)
    return [Text.assemble(("note ", "yellow"), note) for note in found]


def bugs(workspace: Workspace) -> list[Text]:
    """What is known against this very release, whatever fixes it gets."""
    tree = workspace.tree
    return [
        Text.assemble(("known ", "yellow"), f"{bug.says}; instead: {bug.instead} ({bug.source})")
        for bug in load_recipe(tree.project).bugs_of(tree.version)
    ]


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    return {
        "id": verdict.fix.id,
        "state": verdict.state.value,
        "severity": verdict.severity.value if verdict.severity else None,
        "reason": verdict.reason,
        "note": verdict.note or None,
        "edits": len(verdict.edits),
    }


def tree_fields(workspace: Workspace, request: Request) -> dict[str, Any]:
    tree = workspace.tree
    recipe = load_recipe(tree.project)
    return {
        "project": tree.project,
        "version": str(tree.version),
        "kind": tree.kind,
        "root": str(tree.root),
        "target": request.target.name,
        "arch": request.arch,
        recipe.build.variable.lower(): recipe.build.value_for(request),
        "known_bugs": [asdict(bug) for bug in recipe.bugs_of(tree.version)],
    }


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=1, ensure_ascii=False))


def print_diff(text: str) -> None:
    """A unified diff: coloured in a terminal, byte for byte elsewhere."""
    shown = console()
    if not shown.is_terminal:
        click.echo(text, nl=False)
        return
    for line in text.splitlines():
        bold = line.startswith(("+++", "---", "diff "))
        style = "bold" if bold else _DIFF_STYLES.get(line[:1], "")
        shown.print(Text(line, style), soft_wrap=True)


def proof_lines(proofs: Sequence[str]) -> list[Text]:
    return [Text.assemble(("proved ", "green"), proof) for proof in proofs]
