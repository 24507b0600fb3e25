"""Explain a fix, a claim or the text of an error: `patchkit explain`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence

import click

from patchkit.cli.complete import explained
from patchkit.cli.out import record_fields, shown, style, table
from patchkit.cli.patch.verdict_view import diff_blocks
from patchkit.cli.render import Block, Record, rendered
from patchkit.doctor.symptoms.diagnosis import Diagnosis, read_log
from patchkit.doctor.symptoms.scan import Hit
from patchkit.doctor.symptoms.symptom import symptoms
from patchkit.edit.splice import unified_diff
from patchkit.errors import UsageError
from patchkit.patching.fix import Fix
from patchkit.patching.recipe import Claim, load_claims, load_recipes
from patchkit.runtime.rules.rule import in_words

_SHOWN = 3  # symptoms that are shown whole
_FEWEST = 5  # characters of a text that is looked for anywhere in what is said
_SHORTEST = 3  # characters of one that is looked for as a word
_CLAIMS = "What guides say"
_REASONS = "`patchkit explain ID` has the reasons and the evidence."
_MISTYPED = (
    0.8  # how alike two ids are, from 0 to 1, of which one is the other mistyped
)


@click.command("explain")
@click.argument("text", metavar="[ID|TEXT]", required=False, shell_complete=explained)
@rendered
def explain_command(text: str | None) -> Iterator[Block]:
    """Explain a fix: symptom, reason, releases, evidence, before and after.

    Or one of the claims that guides make, and how it stands. Or TEXT, lines of a log or a part of
    one, such as "Message truncated": what it means, why it is printed, what cures it. Without
    either: what there is.
    """
    fixes = [fix for recipe in load_recipes() for fix in recipe.fixes]
    claims = load_claims()
    if text is None:
        yield from _overview(fixes, claims)
        return
    # Ids have underscores; people also write dashes and blanks.
    name = text.casefold().replace("-", "_").replace(" ", "_")
    entries: list[Fix | Claim] = [*fixes, *claims]
    by_id = {entry.id: entry for entry in entries}
    if name in by_id:
        yield from _explanation(by_id[name])
        return
    if known := _explained_symptoms(text):
        yield from _symptom_blocks(known)
        return
    yield from _search_blocks(text, name, by_id)


def _search_blocks(
    text: str, name: str, by_id: Mapping[str, Fix | Claim]
) -> Iterator[Block]:
    """Yield what has a text, whole or as a line each. Raises UsageError if nothing has it."""
    ids = {known.replace("-", "_"): known for known in (*by_id, *symptoms())}
    fitting: list[Fix | Claim] = []
    near: list[Diagnosis] = []
    # A mistyped id is no text to look for; several words are no id.
    if " " in text or not difflib.get_close_matches(name, ids, n=1, cutoff=_MISTYPED):
        fitting = [entry for entry in by_id.values() if _fits(text, _said(entry))]
        near = _explained_symptoms(text, parts=True)
    match len(fitting), len(near):
        case 0, 0:
            close = [ids[it] for it in difflib.get_close_matches(name, ids, n=1)]
            hint = (
                f"did you mean {close[0]}?"
                if close
                else "`patchkit explain` lists them"
            )
            raise UsageError(f"no fix, claim or symptom is {text!r}", hint=hint)
        case 0, few if few <= _SHOWN:
            yield from _symptom_blocks(near)
        case 1, 0:
            yield from _explanation(fitting[0])
        case _:
            yield from _fitting_blocks(fitting, near)


def _overview(fixes: Sequence[Fix], claims: Sequence[Claim]) -> Iterator[Block]:
    """Yield what can be explained, by its ids."""
    titled = (("fixes", fixes), ("symptoms", symptoms().values()))
    listed = {
        title: [{"id": it.id, "title": it.title} for it in its] for title, its in titled
    }
    yield Record({**listed, "claims": claims})
    for recipe in load_recipes():
        titles = [(fix.id, fix.title) for fix in recipe.fixes]
        yield from _section(f"Fixes of {recipe.project}", titles)
    yield from _section(_CLAIMS, [(it.id, it.verdict, it.says) for it in claims])
    yield _REASONS
    yield f"Also an error's text, one of {len(symptoms())} that are known, by any part of it."


def _fitting_blocks(
    entries: Sequence[Fix | Claim], near: Sequence[Diagnosis]
) -> Iterator[Block]:
    """Yield a line for each fix, claim and symptom that has the words that are looked for."""
    fixes = [(entry.id, entry.title) for entry in entries if isinstance(entry, Fix)]
    claims = [entry for entry in entries if isinstance(entry, Claim)]
    met = [
        (diagnosis.symptom.id, diagnosis.filled(diagnosis.symptom.title))
        for diagnosis in near
    ]
    titled = {"fixes": fixes, "symptoms": met}
    listed = {
        title: [{"id": name, "title": said} for name, said in rows]
        for title, rows in titled.items()
    }
    yield Record({**listed, "claims": claims})
    sections: dict[str, Sequence[tuple[str, ...]]] = {
        "Fixes": fixes,
        _CLAIMS: [(claim.id, claim.verdict, claim.says) for claim in claims],
        "Symptoms": met,
    }
    for title, rows in sections.items():
        if rows:
            yield from _section(title, rows)
    yield _REASONS


def _said(entry: Fix | Claim) -> str:
    return entry.says if isinstance(entry, Claim) else f"{entry.title}\n{entry.symptom}"


def _fits(text: str, said: str) -> bool:
    """Return whether a text is a part of what is said, or each of its words is one there.

    One of few characters is looked for as a word alone.
    """
    low = text.casefold()
    here = said.casefold()
    if len(low) < _SHORTEST:
        return False
    if len(low) >= _FEWEST and low in here:
        return True
    return all(re.search(rf"\b{re.escape(word)}\b", here) for word in low.split())


def _explanation(entry: Fix | Claim) -> Iterator[Block]:
    if isinstance(entry, Claim):
        yield Record(entry)
        head = f"  {entry.verdict} {entry.versions}\n"
        texts = {"Claim": entry.says, "Why": entry.why, "Instead": entry.instead}
        examples = []
    else:
        examples = [
            {"version": it.version, "diff": unified_diff(it.path, it.before, it.after)}
            for it in entry.examples
        ]
        names = (
            "id",
            "title",
            "symptom",
            "why",
            "upstream",
            "needs",
            "evidence",
            "requires",
        )
        yield Record(
            {name: getattr(entry, name) for name in names} | {"examples": examples}
        )
        head = f"  {entry.title}\n"
        texts = {"Symptom": entry.symptom, "Why": entry.why, "Upstream": entry.upstream}
    yield style(entry.id, bold=True) + head
    for title, text in texts.items():
        yield from _section(title, [(paragraph,) for paragraph in text.split("\n")])
    if isinstance(entry, Fix):
        needs = [
            (it.versions, it.severity.value, it.limits, it.reason) for it in entry.needs
        ]
        yield from _section("Needed", needs)
    evidence = [(it.established, it.claim, it.source) for it in entry.evidence]
    yield from _section("Evidence", evidence)
    for example in examples:
        yield style("Before and after", bold=True) + f", as in {example['version']}"
        yield from diff_blocks(example["diff"])


def _section(title: str, rows: Sequence[tuple[str, ...]]) -> Iterator[Block]:
    yield style(title, bold=True)
    yield from table(rows, indent="  ")
    yield ""


def _explained_symptoms(text: str, *, parts: bool = False) -> list[Diagnosis]:
    """Return what a text means: the symptom of that id, or those that are in it.

    With ``parts`` those that have it as a part of what they say, or of their titles.
    """
    low = " ".join(text.split()).casefold()
    if parts:
        said = [
            ("\n".join((*it.says, *it.example, it.title)), it)
            for it in symptoms().values()
        ]
        known = [it for texts, it in said if _fits(low, texts)]
    elif text in symptoms():
        known = [symptoms()[text]]
    else:
        return list(read_log([text.encode(errors="replace")], whole=False).diagnoses)
    # Nobody met them: all their causes are open.
    unmet = Hit(0, "", "", {})
    return [Diagnosis(symptom=it, hit=unmet, count=0, causes=it.cause) for it in known]


def _symptom_blocks(found: Sequence[Diagnosis]) -> Iterator[Block]:
    """Yield what symptoms mean."""
    fields = [
        {
            **record_fields(diagnosis.symptom, "cause"),
            "decided": diagnosis.decided,
            "causes": diagnosis.causes,
            "values": diagnosis.hit.values,
        }
        for diagnosis in found
    ]
    yield Record({"symptoms": fields})
    for number, diagnosis in enumerate(found):
        symptom = diagnosis.symptom
        if number:
            yield ""
        follows = (
            ", which follows from another error: look before it"
            if symptom.follows
            else ""
        )
        yield (
            style(symptom.id, bold=True)
            + f"  {diagnosis.filled(symptom.title)}{follows}"
        )
        for text in symptom.says[:3]:
            yield style(f"  {text}", dim=True)
        if len(diagnosis.causes) > 1:
            yield "One of these, the likeliest first:"
        for cause in diagnosis.causes:
            yield shown("")
            yield style("why   ", bold=True) + diagnosis.filled(cause.cause)
            if cause.when:
                yield style(f"      where: {in_words(cause.when)}", dim=True)
            yield style("cure  ", bold=True) + diagnosis.filled(cause.cure)
            if cause.command:
                yield shown("      ") + diagnosis.pasted(cause.command)
            if cause.costs:
                yield shown(f"      costs {cause.costs}")
            if cause.tell and len(diagnosis.causes) > 1:
                yield shown("      to tell: ") + diagnosis.pasted(cause.tell)
            sure = "" if symptom.follows else f", confidence {cause.confidence}"
            yield style(f"      {cause.evidence}{sure}: {cause.source}", dim=True)
