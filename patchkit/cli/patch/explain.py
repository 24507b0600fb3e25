"""Explain a fix, a claim or the text of an error: `patchkit explain`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import asdict

import click

from patchkit.cli import show
from patchkit.cli.complete import explained
from patchkit.cli.options import as_json
from patchkit.cli.out import echo, print_json, say, style, table
from patchkit.cli.symptoms import explained_symptoms, show_symptoms, symptoms_with
from patchkit.doctor.symptoms.diagnosis import Diagnosis
from patchkit.doctor.symptoms.symptom import Symptom, symptoms
from patchkit.edit.splice import unified_diff
from patchkit.errors import UsageError
from patchkit.patching.claims import Claim, load_claims
from patchkit.patching.fix import Evidence, Example, Fix
from patchkit.patching.recipe import load_recipes

_SHOWN = 3  # symptoms that are shown whole
_MISTYPED = 0.8  # how alike two ids are, from 0 to 1, of which one is the other mistyped


def _ids() -> list[str]:
    everything: list[Fix | Claim | Symptom] = [*_all_fixes(), *load_claims(), *symptoms().values()]
    return [each.id for each in everything]


def _all_fixes() -> list[Fix]:
    return [fix for recipe in load_recipes() for fix in recipe.fixes]


@click.command()
@click.argument("wanted", metavar="[ID|TEXT]", required=False, shell_complete=explained)
@as_json
def command(wanted: str | None, *, as_json: bool) -> None:
    """Explain a fix: symptom, reason, releases, evidence, before and after.

    Or one of the claims that guides make, and how it stands. Or TEXT, lines of a log or a part of
    one, such as "Message truncated": what it means, why it is printed, what cures it. Without
    either: what there is.
    """
    if wanted is None:
        _overview(as_json=as_json)
        return
    # Ids have underscores; people also write dashes and blanks.
    name = wanted.casefold().replace("-", "_").replace(" ", "_")
    everything: list[Fix | Claim] = [*_all_fixes(), *load_claims()]
    found = [each for each in everything if each.id == name]
    if not found and (known := explained_symptoms(wanted)):
        show_symptoms(known, as_json=as_json)
        return
    near: list[Diagnosis] = []
    # A mistyped id is no text to look for.
    if not found and not difflib.get_close_matches(name, _ids(), cutoff=_MISTYPED):
        found = [each for each in everything if wanted.casefold() in _said(each).casefold()]
        near = symptoms_with(wanted)
    if near and not found and len(near) <= _SHOWN:
        show_symptoms(near, as_json=as_json)
        return
    ids = [*(each.id for each in found), *(each.symptom.id for each in near)]
    if not ids:
        raise UsageError(f"no fix, claim or symptom is {wanted!r}", hint=_close_to(name))
    if len(ids) > 1:
        what = f"{wanted!r} is in {len(ids)} fixes, claims and symptoms"
        raise UsageError(what, hint=f"take one: {', '.join(ids)}")
    only = found[0]
    if isinstance(only, Claim):
        _claim(only, as_json=as_json)
    else:
        _fix(only, as_json=as_json)


def _said(entry: Fix | Claim) -> str:
    """Return what a user would look for: the claim, or the symptom."""
    return entry.says if isinstance(entry, Claim) else entry.symptom


def _close_to(name: str) -> str:
    close = difflib.get_close_matches(name, _ids(), n=1) or difflib.get_close_matches(
        name.replace("_", "-"), _ids(), n=1
    )
    return f"did you mean {close[0]}?" if close else "`patchkit explain` lists them"


def _overview(*, as_json: bool) -> None:
    recipes, claims = load_recipes(), load_claims()
    if as_json:
        print_json(
            {
                "fixes": [{"id": fix.id, "title": fix.title} for fix in _all_fixes()],
                "claims": [_claim_fields(claim) for claim in claims],
                "symptoms": [{"id": s.id, "title": s.title} for s in symptoms().values()],
            }
        )
        return
    for recipe in recipes:
        _rows(f"Fixes of {recipe.project}", ((fix.id, fix.title) for fix in recipe.fixes))
    _rows("What guides say", ((claim.id, claim.verdict, claim.says) for claim in claims))
    say("`patchkit explain ID` has the reasons and the evidence.")
    say(f"Also the text of an error, one of {len(symptoms())} that are known, by any part of it.")


def _claim(claim: Claim, *, as_json: bool) -> None:
    if as_json:
        print_json(_claim_fields(claim))
        return
    say(style(claim.id, bold=True) + f"  {claim.verdict} {claim.versions}\n")
    for title, text in (("Claim", claim.says), ("Why", claim.why), ("Instead", claim.instead)):
        _section(title, text)
    _rows("Evidence", _evidence(claim.evidence))


def _fix(fix: Fix, *, as_json: bool) -> None:
    if as_json:
        print_json(_fields(fix))
        return
    say(style(fix.id, bold=True) + f"  {fix.title}\n")
    for title, text in (("Symptom", fix.symptom), ("Why", fix.why), ("Upstream", fix.upstream)):
        _section(title, text)
    needs = ((each.versions, each.severity.value, each.limits, each.reason) for each in fix.needs)
    _rows("Needed", needs)
    _rows("Evidence", _evidence(fix.evidence))
    for example in fix.examples:
        say(style("Before and after", bold=True) + f", as in {example.version}")
        show.print_diff(unified_diff(example.path, example.before, example.after))


def _section(title: str, text: str) -> None:
    say(style(title, bold=True))
    for paragraph in text.split("\n"):
        say(f"  {paragraph}", hang=0)
    say("")


def _rows(title: str, rows: Iterable[tuple[str, ...]]) -> None:
    say(style(title, bold=True))
    echo([*table(rows, indent="  "), ""])


def _evidence(evidence: Iterable[Evidence]) -> list[tuple[str, ...]]:
    return [(each.established, each.claim, each.source) for each in evidence]


def _claim_fields(claim: Claim) -> dict[str, object]:
    return {**asdict(claim), "evidence": _evidence_fields(claim.evidence)}


def _evidence_fields(evidence: Iterable[Evidence]) -> list[dict[str, str]]:
    # The key is from before `established`; scripts rely on it.
    return [{"claim": e.claim, "source": e.source, "confidence": e.established} for e in evidence]


def _fields(fix: Fix) -> dict[str, object]:
    return {
        "id": fix.id,
        "title": fix.title,
        "symptom": fix.symptom,
        "why": fix.why,
        "upstream": fix.upstream,
        "needs": [{**asdict(need), "severity": need.severity.value} for need in fix.needs],
        "evidence": _evidence_fields(fix.evidence),
        "requires": list(fix.requires),
        "examples": [_example(example) for example in fix.examples],
    }


def _example(example: Example) -> dict[str, str]:
    return {
        "version": example.version,
        "diff": unified_diff(example.path, example.before, example.after),
    }
