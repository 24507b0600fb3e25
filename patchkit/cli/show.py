"""Show with rich what several verbs have in common, and return the same as fields for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from patchkit.cli import out
from patchkit.patching.commit import Applied
from patchkit.patching.fix import Request, State, Verdict
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import Workspace
from patchkit.quoting import visible

STYLES = {
    State.APPLY: ("→", "yellow"),
    State.APPLIED: ("✓", "green"),
    State.UPSTREAM: ("=", "cyan"),
    State.NOT_APPLICABLE: ("·", "dim"),
    State.OFF: ("○", "dim"),
    State.DRIFTED: ("✗", "bold red"),
}

_DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


class _Console(Console):
    """A console that takes no text for markup, and escapes what a terminal would obey."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape a text: every ``str`` comes through here, in a cell of a table as well."""
        # rich calls this for every str; Text objects are made of visible() parts already.
        return super().render_str(visible(text), **options)


def console(*, stderr: bool = False) -> Console:
    """Return standard output; where it is no terminal, without colour and 160 columns wide."""
    # In a pipe rich assumes 80 columns, which would cut paths.
    found = _Console(stderr=stderr)
    return found if found.is_terminal else _Console(stderr=stderr, width=160)


def text(*parts: str | tuple[str, str], style: str = "") -> Text:
    """Return parts, each escaped; a part with a style is a pair: ``("gb10.so", "bold")``."""
    pairs = [(each, "") if isinstance(each, str) else each for each in parts]
    return Text.assemble(*((visible(each), own) for each, own in pairs), style=style)


def header(workspace: Workspace, request: Request) -> Text:
    """Return one line: what is patched, and for which device."""
    tree, target = workspace.tree, request.target
    return text(
        (f"{tree.project} {tree.version}", "bold"),
        f"  {tree.kind}  →  {target.title}, {request.arch} ",
        (load_recipe(tree.project).build.value_for(request), "bold"),
    )


def verdict_table(verdicts: Iterable[Verdict]) -> Table:
    """Return a row for each fix."""
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
            text(sign, style=style),
            text(verdict.fix.id, style="dim" if quiet else ""),
            text(verdict.state.value, style=style),
            text(severity, style="dim" if quiet else ""),
            text(verdict.reason, style="dim"),
        )
    return table


def notes(verdicts: Iterable[Verdict]) -> list[Text]:
    """Return the notes of verdicts, each once."""
    found = dict.fromkeys(verdict.note for verdict in verdicts if verdict.note)
    return [text(("note ", "yellow"), note) for note in found]


def bugs(workspace: Workspace) -> list[Text]:
    """Return the known bugs of this release, whatever fixes it gets."""
    tree = workspace.tree
    return [
        text(("known ", "yellow"), f"{bug.says}; instead: {bug.instead} ({bug.source})")
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


def print_diff(diff: str) -> None:
    """Print a unified diff: coloured in a terminal, byte for byte elsewhere."""
    shown = console()
    if not shown.is_terminal or not diff:
        out.data(diff)
        return
    # Not splitlines: it also splits at form feeds and the like, which a source may hold.
    for line in diff.removesuffix("\n").split("\n"):
        bold = line.startswith(("+++", "---", "diff "))
        style = "bold" if bold else _DIFF_STYLES.get(line[:1], "")
        shown.print(text(line, style=style), soft_wrap=True)


def recorded_lines(outcome: Applied) -> list[Text]:
    """Return what an earlier run proved by the ledger; this run did not prove it again."""
    if not outcome.recorded_proofs:
        return []
    said = f"recorded as proved by {outcome.recorded_by}, not proved again:"
    return [text(said, style="cyan"), *(text(f"  {proof}") for proof in outcome.recorded_proofs)]


def proof_lines(proofs: Sequence[str]) -> list[Text]:
    """Return what this run proved."""
    return [text(("proved ", "green"), proof) for proof in proofs]
