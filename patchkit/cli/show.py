"""Show what several verbs have in common about trees and fixes, and return it as JSON fields."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import click

from patchkit.cli import out
from patchkit.cli.out import LaidOut, Shown, style
from patchkit.patching.commit import Applied
from patchkit.patching.fix import Request, Severity, State, Verdict
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import Workspace

_Style = Mapping[str, Any]
STYLES: Mapping[State, tuple[str, _Style]] = {
    State.APPLY: ("→", {"fg": "yellow"}),
    State.APPLIED: ("✓", {"fg": "green"}),
    State.UPSTREAM: ("=", {"fg": "cyan"}),
    State.NOT_APPLICABLE: ("·", {"dim": True}),
    State.OFF: ("○", {"dim": True}),
    State.DRIFTED: ("✗", {"fg": "red", "bold": True}),
}
_SAID = {  # what a line of many fixes begins with
    State.APPLY: "to apply",
    State.APPLIED: "applied",
    State.UPSTREAM: "in upstream already",
    State.NOT_APPLICABLE: "not for this release or device",
    State.OFF: "off",
}
_DONE = (State.APPLY, State.APPLIED)
_NEEDED = (Severity.REQUIRED, Severity.RECOMMENDED)
_DIFF_STYLES: Mapping[str, _Style] = {"+": {"fg": "green"}, "-": {"fg": "red"}, "@": {"fg": "cyan"}}

verbose = click.option("-v", "--verbose", is_flag=True, help="Show all of it.")

GOOD = style("✓", fg="green") + " "
BAD = style("✗", fg="red", bold=True) + " "


def word(text: str) -> Shown:
    """Return what a note begins with: ``note``, ``known``, ``beware``."""
    return style(text, fg="yellow") + " "


def header(workspace: Workspace, request: Request) -> Shown:
    """Return one line: what is patched, and for which device."""
    tree, target = workspace.tree, request.target
    built = load_recipe(tree.project).build.value_for(request)
    return (
        style(f"{tree.project} {tree.version}", bold=True)
        + f"  {tree.kind}  →  {target.title}, {request.arch} "
        + style(built, bold=True)
    )


def verdict_lines(verdicts: Sequence[Verdict], *, verbose: bool) -> list[Shown]:
    """Return a row for each fix; or, if it is not verbose, a line for each state.

    What drifted, and what a patched tree still needs, is there in both with what the code says.
    """
    if verbose:
        heads = ("", "fix", "state", "severity", "what the code says")
        return [*out.table(map(_row, verdicts), heads=heads)]
    return [*_attention(verdicts), *_by_state(verdicts)]


def _row(verdict: Verdict) -> tuple[str, ...]:
    sign, how = STYLES[verdict.state]
    needed = verdict.state not in (State.UPSTREAM, State.NOT_APPLICABLE)
    severity = verdict.severity.value if verdict.severity and needed else ""
    dim = verdict.state in (State.NOT_APPLICABLE, State.OFF)
    return (
        style(sign, **how),
        style(verdict.fix.id, dim=dim or None),
        style(verdict.state.value, **how),
        style(severity, dim=dim or None),
        style(verdict.reason, dim=True),
    )


def _attention(verdicts: Iterable[Verdict]) -> Iterator[Shown]:
    for verdict in verdicts:
        if verdict.state is State.DRIFTED:
            yield BAD + style(verdict.fix.id, bold=True) + f" drifted: {verdict.reason}"


def _by_state(verdicts: Sequence[Verdict]) -> Iterator[Shown]:
    groups: dict[tuple[State, Severity | None], list[str]] = {}
    for verdict in verdicts:
        groups.setdefault((verdict.state, verdict.severity), []).append(verdict.fix.id)
    # What is optional is off unless it is asked for; anything else was left out.
    for state, severity in (*product(_DONE, Severity), *product([State.OFF], _NEEDED)):
        if named := groups.pop((state, severity), []):
            sign, how = STYLES[state]
            yield style(f"{sign} {_SAID[state]}, {severity.value}:", **how) + f" {', '.join(named)}"
    counts = Counter(state for (state, _), named in groups.items() for _ in named)
    counts.pop(State.DRIFTED, None)
    if counts:
        said = ", ".join(f"{count} {_SAID[state]}" for state, count in counts.items())
        yield style(f"= {said}; -v lists them", dim=True)


def notes(verdicts: Iterable[Verdict]) -> list[Shown]:
    """Return the notes of verdicts, each once."""
    return [word("note") + note for note in dict.fromkeys(v.note for v in verdicts if v.note)]


def bugs(workspace: Workspace) -> list[Shown]:
    """Return the known bugs of this release, whatever fixes it gets."""
    tree = workspace.tree
    return [
        word("known") + f"{bug.says}; instead: {bug.instead} ({bug.source})"
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
    if not (sys.stdout.isatty() or out.colour()) or not diff:
        out.data(diff)
        return
    # Not splitlines: it also splits at form feeds and the like, which a source may hold.
    for line in diff.removesuffix("\n").split("\n"):
        bold = line.startswith(("+++", "---", "diff "))
        how: _Style = {"bold": True} if bold else _DIFF_STYLES.get(line[:1], {})
        out.say(LaidOut(style(line, **how)))


def recorded_lines(outcome: Applied, *, verbose: bool) -> list[Shown]:
    """Return what an earlier run proved by the ledger; this run did not prove it again."""
    if not outcome.recorded_proofs:
        return []
    said = f"recorded as proved by {outcome.recorded_by}, not proved again:"
    if not verbose:
        return [style(said, fg="cyan") + f" {len(outcome.recorded_proofs)} effects"]
    return [style(said, fg="cyan"), *(out.shown(f"  {each}") for each in outcome.recorded_proofs)]


def proof_lines(proofs: Sequence[str], *, verbose: bool) -> list[Shown]:
    """Return what this run proved: all of it, or how much, and the first."""
    proved = style("proved", fg="green")
    if verbose or len(proofs) < 2:
        return [proved + f" {proof}" for proof in proofs]
    return [proved + f" {len(proofs)} effects with the release's own code, such as: {proofs[0]}"]


def gigabytes(size: float) -> str:
    """Return an amount of bytes as people read it."""
    for unit, bytes_per_unit in (("GB", 1e9), ("MB", 1e6)):
        if size >= bytes_per_unit / 10:
            return f"{size / bytes_per_unit:,.1f} {unit}"
    return f"{size / 1e3:,.1f} kB"
