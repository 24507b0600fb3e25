"""Explain a fix, a claim or the text of an error: `patchkit explain`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

import click

from patchkit.cli.complete import explained
from patchkit.cli.out import style, table
from patchkit.cli.patch.verdict_view import diff_blocks
from patchkit.cli.render import Block, Record, rendered
from patchkit.cli.symptoms import explained_symptoms, symptom_blocks, symptoms_with
from patchkit.doctor.symptoms.diagnosis import Diagnosis
from patchkit.doctor.symptoms.symptom import symptoms
from patchkit.edit.splice import unified_diff
from patchkit.errors import UsageError
from patchkit.patching.claims import Claim, load_claims
from patchkit.patching.fix import Fix
from patchkit.patching.recipe import load_recipes

_SHOWN = 3  # symptoms that are shown whole
_MISTYPED = 0.8  # how alike two ids are, from 0 to 1, of which one is the other mistyped


@click.command()
@click.argument("text", metavar="[ID|TEXT]", required=False, shell_complete=explained)
@rendered
def command(text: str | None) -> Iterator[Block]:
    """Explain a fix: symptom, reason, releases, evidence, before and after.

    Or one of the claims that guides make, and how it stands. Or TEXT, lines of a log or a part of
    one, such as "Message truncated": what it means, why it is printed, what cures it. Without
    either: what there is.
    """
    if text is None:
        yield from _overview()
        return
    fixes = [fix for recipe in load_recipes() for fix in recipe.fixes]
    entries: list[Fix | Claim] = [*fixes, *load_claims()]
    ids = [*(entry.id for entry in entries), *symptoms()]
    # Ids have underscores; people also write dashes and blanks.
    name = text.casefold().replace("-", "_").replace(" ", "_")
    found = [entry for entry in entries if entry.id == name]
    if not found and (known := explained_symptoms(text)):
        yield from symptom_blocks(known)
        return
    near: list[Diagnosis] = []
    # A mistyped id is no text to look for.
    if not found and not difflib.get_close_matches(name, ids, cutoff=_MISTYPED):
        found = [entry for entry in entries if text.casefold() in _symptom(entry).casefold()]
        near = symptoms_with(text)
    if near and not found and len(near) <= _SHOWN:
        yield from symptom_blocks(near)
        return
    if len(found) != 1 or near:
        matches = [*(entry.id for entry in found), *(diagnosis.symptom.id for diagnosis in near)]
        raise _unclear(text, matches, ids)
    entry = found[0]
    yield from _claim_blocks(entry) if isinstance(entry, Claim) else _fix_blocks(entry)


def _symptom(entry: Fix | Claim) -> str:
    """Return what a user would look for: the claim, or the symptom."""
    return entry.says if isinstance(entry, Claim) else entry.symptom


def _unclear(text: str, matches: list[str], ids: list[str]) -> UsageError:
    if matches:
        what = f"{text!r} is in {len(matches)} fixes, claims and symptoms"
        return UsageError(what, hint=f"take one: {', '.join(matches)}")
    name = text.casefold().replace(" ", "_")
    close = [
        match
        for spelling in (name.replace("-", "_"), name.replace("_", "-"))
        for match in difflib.get_close_matches(spelling, ids, n=1)
    ]
    hint = f"did you mean {close[0]}?" if close else "`patchkit explain` lists them"
    return UsageError(f"no fix, claim or symptom is {text!r}", hint=hint)


def _overview() -> Iterator[Block]:
    recipes, claims = load_recipes(), load_claims()
    fixes = [fix for recipe in recipes for fix in recipe.fixes]
    yield Record(
        {
            "fixes": [{"id": fix.id, "title": fix.title} for fix in fixes],
            "claims": claims,
            "symptoms": [{"id": it.id, "title": it.title} for it in symptoms().values()],
        }
    )
    for recipe in recipes:
        rows = [(fix.id, fix.title) for fix in recipe.fixes]
        yield from _titled_rows(f"Fixes of {recipe.project}", rows)
    rows_of_claims = [(claim.id, claim.verdict, claim.says) for claim in claims]
    yield from _titled_rows("What guides say", rows_of_claims)
    yield "`patchkit explain ID` has the reasons and the evidence."
    yield f"Also the text of an error, one of {len(symptoms())} that are known, by any part of it."


def _claim_blocks(claim: Claim) -> Iterator[Block]:
    yield Record(claim)
    yield style(claim.id, bold=True) + f"  {claim.verdict} {claim.versions}\n"
    for title, text in (("Claim", claim.says), ("Why", claim.why), ("Instead", claim.instead)):
        yield from _section(title, text)
    yield from _titled_rows("Evidence", _evidence_rows(claim))


def _fix_blocks(fix: Fix) -> Iterator[Block]:
    examples = [
        (example.version, unified_diff(example.path, example.before, example.after))
        for example in fix.examples
    ]
    names = ("id", "title", "symptom", "why", "upstream", "needs", "evidence", "requires")
    yield Record(
        {
            **{name: getattr(fix, name) for name in names},
            "examples": [{"version": version, "diff": diff} for version, diff in examples],
        }
    )
    yield style(fix.id, bold=True) + f"  {fix.title}\n"
    for title, text in (("Symptom", fix.symptom), ("Why", fix.why), ("Upstream", fix.upstream)):
        yield from _section(title, text)
    needs = [(it.versions, it.severity.value, it.limits, it.reason) for it in fix.needs]
    yield from _titled_rows("Needed", needs)
    yield from _titled_rows("Evidence", _evidence_rows(fix))
    for version, diff in examples:
        yield style("Before and after", bold=True) + f", as in {version}"
        yield from diff_blocks(diff)


def _section(title: str, text: str) -> Iterator[Block]:
    yield style(title, bold=True)
    yield from table(((paragraph,) for paragraph in text.split("\n")), indent="  ")
    yield ""


def _titled_rows(title: str, rows: Iterable[tuple[str, ...]]) -> Iterator[Block]:
    yield style(title, bold=True)
    yield from table(rows, indent="  ")
    yield ""


def _evidence_rows(entry: Fix | Claim) -> list[tuple[str, ...]]:
    return [(it.established, it.claim, it.source) for it in entry.evidence]
