"""Show the tree, verdicts, proofs and diffs for the verbs about source trees."""

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

from patchkit.cli.out import LaidOut, Shown, bold, colour, dim, style, table
from patchkit.cli.render import (
    BAD,
    STYLES,
    Blocks,
    Data,
    Lines,
    Row,
    Style,
    lead_word,
    note,
)
from patchkit.frozen import Fields
from patchkit.patching.fix import Request, Severity, State, Verdict
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import Workspace
from patchkit.records import read_toml
from patchkit.source.tree import SourceTree

_STYLES = read_toml(dict[str, tuple[str, str, Style]], STYLES, key="state")
# States and severities whose fixes get a line. Optional fixes are off by default: they are counted.
# The severity of a patch that the user named is None.
_LISTED = [
    *product((State.APPLY, State.APPLIED), (*Severity, None)),
    (State.OFF, Severity.REQUIRED),
    (State.OFF, Severity.RECOMMENDED),
]
# States in which the severity of a fix does not matter.
_UNSEVERE = (State.UPSTREAM, State.NOT_APPLICABLE)
_DIFF_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


def tree_blocks(workspace: Workspace, request: Request, **more: Any) -> Blocks:
    """Yield a tree and its device; with --json also the known bugs of its release, and ``more``."""
    tree = workspace.tree
    target = request.target
    recipe = load_recipe(tree.project)
    build = recipe.facts.build
    built = build.value_for(target, request.arch)
    variable = build.variable.lower()
    fields = {
        "project": tree.project,
        "version": tree.version,
        "kind": tree.kind,
        "root": tree.root,
        "target": target.name,
        "arch": request.arch,
        **({variable: built} if variable else {}),
        **request.patch_facts,
        "known_bugs": recipe.bugs_of(tree.version),
        "recipe": recipe.digest,
        "added_recipes": recipe.added,
    }
    yield fields | more

    release = bold(f"{tree.project} {tree.version}")
    device = f"  {tree.kind}  →  {target.title}, {request.arch} "
    yield release + device + bold(built)
    if target.untried:
        yield note(target.untried)
    if recipe.added:
        yield dim(f"with recipes of yours: {', '.join(map(str, recipe.added))}")


def verdict_fields(verdict: Verdict) -> Fields:
    """Return the fields of a verdict for JSON."""
    return {
        "id": verdict.fix.id,
        "state": verdict.state.value,
        "severity": verdict.severity.value if verdict.severity else None,
        "reason": verdict.reason,
        "note": verdict.note or None,
        "edits": len(verdict.edits),
    }


def verdict_lines(verdicts: Sequence[Verdict], *, verbose: bool) -> Lines:
    """Yield a row for each fix if ``verbose``, otherwise a line for each state.

    Among the lines for states, each drifted fix has one of its own, with the reason.
    """
    if verbose:
        heads = ("", "fix", "state", "severity", "what the code says")
        yield from table(map(_verdict_row, verdicts), heads=heads)
        return

    groups: dict[tuple[State, Severity | None], list[str]] = {}
    for verdict in verdicts:
        if verdict.state is State.DRIFTED:
            name = bold(verdict.fix.id)
            yield BAD + name + f" drifted: {verdict.reason}"
        else:
            group = groups.setdefault((verdict.state, verdict.severity), [])
            group.append(verdict.fix.id)

    for state, severity in _LISTED:
        if fixes := groups.pop((state, severity), []):
            sign, title, styles = _STYLES[state]
            level = f", {severity.value}" if severity else ""
            yield style(f"{sign} {title}{level}:", **styles) + f" {', '.join(fixes)}"

    counts = Counter[State]()
    for (state, _severity), fixes in groups.items():
        counts[state] += len(fixes)
    if counts:
        texts = [f"{count} {_STYLES[state][1]}" for state, count in counts.items()]
        yield dim(f"= {', '.join(texts)}; -v lists them")


def _verdict_row(verdict: Verdict) -> Row:
    sign, _title, styles = _STYLES[verdict.state]
    severity = ""
    if verdict.severity and verdict.state not in _UNSEVERE:
        severity = verdict.severity.value

    return (
        style(sign, **styles),
        verdict.fix.id,
        style(verdict.state.value, **styles),
        severity,
        dim(verdict.reason),
    )


def verdict_notes(verdicts: Sequence[Verdict], tree: SourceTree) -> Lines:
    """Yield the notes of a tree and of verdicts, each once, and the known bugs of its release."""
    notes = [tree.note, *(verdict.note for verdict in verdicts)]
    yield from (note(text) for text in dict.fromkeys(notes) if text)

    for bug in load_recipe(tree.project).bugs_of(tree.version):
        yield lead_word("known") + f"{bug.says}; instead: {bug.instead} ({bug.source})"


def proof_lines(proofs: Sequence[str], *, verbose: bool) -> list[Shown]:
    """Return the effects that this run proved: each, or their number and the first."""
    head = style("proved", fg="green")
    if verbose or len(proofs) < 2:
        return [head + f" {proof}" for proof in proofs]

    text = f" {len(proofs)} effects with the release's own code, such as: {proofs[0]}"
    return [head + text]


def diff_blocks(diff: str) -> Blocks:
    """Yield a unified diff: coloured in a terminal, byte for byte elsewhere."""
    if not diff or not (sys.stdout.isatty() or colour()):
        yield Data(diff)
        return

    # splitlines() would also split at form feeds and the like, which a source may hold.
    for line in diff.removesuffix("\n").split("\n"):
        yield LaidOut(style(line, fg=_DIFF_COLOURS.get(line[:1])))
