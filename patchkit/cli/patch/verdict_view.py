"""Show what the verbs about source trees have in common: the tree, verdicts, proofs, a diff."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from patchkit.cli.out import LaidOut, Shown, colour, style, table
from patchkit.cli.render import BAD, Block, Data, Record, lead_word
from patchkit.patching.fix import Request, Severity, State, Verdict
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import Workspace
from patchkit.source.tree import SourceTree

_Style = Mapping[str, Any]
_STYLES: Mapping[
    State, tuple[str, str, _Style]
] = {  # sign, what a line of many begins with
    State.APPLY: ("→", "to apply", {"fg": "yellow"}),
    State.APPLIED: ("✓", "applied", {"fg": "green"}),
    State.UPSTREAM: ("=", "in upstream already", {"fg": "cyan"}),
    State.NOT_APPLICABLE: ("·", "not for this release or device", {"dim": True}),
    State.OFF: ("○", "off", {"dim": True}),
    State.DRIFTED: ("✗", "drifted", {"fg": "red", "bold": True}),
}
_DIFF_STYLES: Mapping[str, _Style] = {
    "+": {"fg": "green"},
    "-": {"fg": "red"},
    "@": {"fg": "cyan"},
}


def tree_blocks(workspace: Workspace, request: Request, **more: Any) -> Iterator[Block]:
    """Yield what is patched, for which device, and the release's known bugs as JSON has them."""
    tree, target = workspace.tree, request.target
    recipe = load_recipe(tree.project)
    built = recipe.build.value_for(request)
    known = {
        name: getattr(tree, name) for name in ("project", "version", "kind", "root")
    }
    known |= {
        "target": target.name,
        "arch": request.arch,
        recipe.build.variable.lower(): built,
    }
    known |= request.patch_facts
    yield Record({**known, "known_bugs": recipe.bugs_of(tree.version), **more})
    name = style(f"{tree.project} {tree.version}", bold=True)
    yield (
        name
        + f"  {tree.kind}  →  {target.title}, {request.arch} "
        + style(built, bold=True)
    )


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    """Return what --json says of a verdict."""
    return {
        "id": verdict.fix.id,
        "state": verdict.state.value,
        "severity": verdict.severity.value if verdict.severity else None,
        "reason": verdict.reason,
        "note": verdict.note or None,
        "edits": len(verdict.edits),
    }


def verdict_lines(verdicts: Sequence[Verdict], *, verbose: bool) -> Iterator[Shown]:
    """Yield a row for each fix; or, if it is not verbose, a line for each state.

    What drifted, and what a patched tree still needs, is there in both with what the code says.
    """
    if verbose:
        heads = ("", "fix", "state", "severity", "what the code says")
        rows = []
        for verdict in verdicts:
            sign, _said, how = _STYLES[verdict.state]
            is_needed = verdict.state not in (State.UPSTREAM, State.NOT_APPLICABLE)
            severity = verdict.severity.value if verdict.severity and is_needed else ""
            dim = verdict.state in (State.NOT_APPLICABLE, State.OFF) or None
            cells = style(verdict.fix.id, dim=dim), style(verdict.state.value, **how)
            reason = style(verdict.reason, dim=True)
            rows.append((style(sign, **how), *cells, style(severity, dim=dim), reason))
        yield from table(rows, heads=heads)
        return
    groups: dict[tuple[State, Severity | None], list[str]] = {}
    for verdict in verdicts:
        if verdict.state is State.DRIFTED:
            yield BAD + style(verdict.fix.id, bold=True) + f" drifted: {verdict.reason}"
        else:
            groups.setdefault((verdict.state, verdict.severity), []).append(
                verdict.fix.id
            )
    # What is optional is off unless it is asked for; anything else was left out.
    # A patch that the user named is of no severity.
    states = [*product((State.APPLY, State.APPLIED), (*Severity, None))]
    states += [(State.OFF, Severity.REQUIRED), (State.OFF, Severity.RECOMMENDED)]
    for state, severity in states:
        if fixes := groups.pop((state, severity), []):
            sign, said, how = _STYLES[state]
            level = f", {severity.value}" if severity else ""
            yield style(f"{sign} {said}{level}:", **how) + f" {', '.join(fixes)}"
    counts = Counter(state for (state, _), fixes in groups.items() for _ in fixes)
    if counts:
        said = ", ".join(
            f"{count} {_STYLES[state][1]}" for state, count in counts.items()
        )
        yield style(f"= {said}; -v lists them", dim=True)


def verdict_notes(verdicts: Sequence[Verdict], tree: SourceTree) -> Iterator[Shown]:
    """Yield the notes of a tree and of verdicts, each once, and the known bugs of a release."""
    for note in dict.fromkeys([tree.note, *(verdict.note for verdict in verdicts)]):
        if note:
            yield lead_word("note") + note
    for bug in load_recipe(tree.project).bugs_of(tree.version):
        yield lead_word("known") + f"{bug.says}; instead: {bug.instead} ({bug.source})"


def proof_lines(proofs: Sequence[str], *, verbose: bool) -> list[Shown]:
    """Return what this run proved: all of it, or how much, and the first."""
    proved = style("proved", fg="green")
    if verbose or len(proofs) < 2:
        return [proved + f" {proof}" for proof in proofs]
    return [
        proved
        + f" {len(proofs)} effects with the release's own code, such as: {proofs[0]}"
    ]


def diff_blocks(diff: str) -> Iterator[Block]:
    """Yield a unified diff: coloured in a terminal, byte for byte elsewhere."""
    if not (sys.stdout.isatty() or colour()) or not diff:
        yield Data(diff)
        return
    # Not splitlines: it also splits at form feeds and the like, which a source may hold.
    for line in diff.removesuffix("\n").split("\n"):
        bold = line.startswith(("+++", "---", "diff "))
        how: _Style = {"bold": True} if bold else _DIFF_STYLES.get(line[:1], {})
        yield LaidOut(style(line, **how))
