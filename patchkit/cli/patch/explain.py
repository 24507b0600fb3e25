"""Explain a fix, a claim or the text of an error: `patchkit explain`."""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import log

import click

from patchkit.cli.out import bold, dim, record_fields
from patchkit.cli.render import (
    Blocks,
    Data,
    Lines,
    Record,
    Row,
    options_of,
    rendered,
    section,
)
from patchkit.doctor.symptoms.diagnosis import Diagnosis, read_log
from patchkit.doctor.symptoms.scan import Hit
from patchkit.doctor.symptoms.symptom import Cause, Symptom, symptoms
from patchkit.edit.splice import unified_diff
from patchkit.errors import UsageError
from patchkit.frozen import Fields
from patchkit.patching.fix import Evidence, Fix
from patchkit.patching.recipe import Claim, load_claims, load_recipes
from patchkit.quoting import quoted
from patchkit.runtime.rules.rule import describe_condition
from patchkit.source.project import projects

_SHOWN = 3  # symptoms: so many are shown in full, more as a list
_LEAST_PART = 5  # characters: a text as long as this is found inside a word, too
_LEAST_WORD = 3  # characters: a shorter text is not searched for
_NEAREST = 8  # names at most of what shares words with a text
_COMMON = 0.1  # a word in more than this part of the wordings says nothing
_NEAR = 0.6  # of the best score: what has less is left out
_MISTYPED = 0.8  # likeness, 0 to 1: a text that is this like an id is the id with a typing error
# The fields of a fix that --json prints.
_FIX_FACTS = "id title symptom why upstream needs evidence requires"
_Rows = Sequence[Row]
_Entry = Fix | Claim | Symptom


@click.command
@options_of("explain")
@rendered
def explain_command(text: str | None) -> Blocks:
    """Explain a fix: symptom, reason, releases, evidence, before and after.

    ID may also be a claim that guides make: is it true? TEXT is a line of a log or a part of it,
    such as "Message truncated": what it means, why it is printed, what cures it. Without ID or
    TEXT: list them.
    """
    fixes = {fix.id: fix for recipe in load_recipes() for fix in recipe.fixes}
    claims = {claim.id: claim for name in projects() for claim in load_claims(name)}
    if text is None:
        titles = [(symptom.id, symptom.title) for symptom in symptoms().values()]
        yield _listed(fixes.values(), claims.values(), titles)
        yield from _list_lines(fixes.values(), claims.values())
        yield f"Also an error's text, one of {len(titles)} that are known, by any part of it."
        return

    name = _as_id(text)
    if name in fixes:
        yield from _fix_blocks(fixes[name])
    elif name in claims:
        yield from _claim_blocks(claims[name])
    elif diagnoses := _read_symptoms(text):
        yield from _symptom_blocks(diagnoses)
    else:
        yield from _search_blocks(text, fixes, claims)


def _as_id(text: str) -> str:
    """Return a text in the spelling of ids: lower case, with underscores for dashes and blanks."""
    return text.casefold().replace("-", "_").replace(" ", "_")


def _search_blocks(
    text: str, fixes: Mapping[str, Fix], claims: Mapping[str, Claim]
) -> Blocks:
    """Yield what contains a text: one entry or a few diagnoses in full, anything more as a list.

    If nothing contains all words of the text, what shares the rarest of them is listed. Raises
    UsageError if nothing does; the error suggests the id that the text resembles.
    """
    entries: dict[str, _Entry] = {**fixes, **claims, **symptoms()}
    ids = {name.replace("-", "_"): name for name in entries}
    mistyped = difflib.get_close_matches(_as_id(text), ids, n=1, cutoff=_MISTYPED)

    # One word may be a mistyped id: then nothing is listed, and the error suggests that id.
    exact = {name for name, row in entries.items() if _fits(text, _wording(row))}
    is_id = " " not in text
    names = exact if exact or is_id else _nearest_names(text, entries)
    if not names or (mistyped and is_id):
        hint = quoted("patchkit", "explain", *map(ids.__getitem__, mistyped))
        raise UsageError(f"no fix, claim or symptom is {text!r}", hint=hint)

    rows = [row for name, row in entries.items() if name in names]
    diagnoses = [_unmet(row) for row in rows if isinstance(row, Symptom)]
    if not exact:
        yield "Nothing has all of these words; the nearest:"
        yield from _hit_list(rows, diagnoses)
        return

    match rows:
        case [Fix() as fix]:
            yield from _fix_blocks(fix)
        case [Claim() as claim]:
            yield from _claim_blocks(claim)
        case _ if len(diagnoses) == len(rows) <= _SHOWN:
            yield from _symptom_blocks(diagnoses)
        case _:
            yield from _hit_list(rows, diagnoses)


def _hit_list(rows: Iterable[_Entry], diagnoses: Iterable[Diagnosis]) -> Blocks:
    fixes = [row for row in rows if isinstance(row, Fix)]
    claims = [row for row in rows if isinstance(row, Claim)]
    titles = [(row.symptom.id, row.filled(row.symptom.title)) for row in diagnoses]
    yield _listed(fixes, claims, titles)
    yield from _list_lines(fixes, claims, titles)


def _listed(fixes: Iterable[Fix], claims: Iterable[Claim], titles: _Rows) -> Fields:
    """Return fixes, claims and symptoms (id and title) for --json."""
    return {
        "fixes": [{"id": fix.id, "title": fix.title} for fix in fixes],
        "symptoms": [{"id": name, "title": title} for name, title in titles],
        "claims": list(claims),
    }


def _list_lines(
    fixes: Iterable[Fix], claims: Iterable[Claim], titles: _Rows = ()
) -> Blocks:
    """Yield a line for each fix, claim and symptom."""
    sections: dict[str, _Rows] = {
        "Fixes": [(fix.id, fix.title) for fix in fixes],
        "What guides say": [(row.id, row.verdict, row.says) for row in claims],
        "Symptoms": titles,
    }
    for title, rows in sections.items():
        if rows:
            yield from section(title, rows)

    yield "`patchkit explain ID` has the reasons and the evidence."


def _wording(row: _Entry) -> str:
    """Return what tells an entry from others, as those who meet it say it."""
    if isinstance(row, Symptom):
        return "\n".join((*row.says, *row.example, row.title))

    return row.says if isinstance(row, Claim) else f"{row.title}\n{row.symptom}"


def _nearest_names(text: str, rows: Mapping[str, _Entry]) -> set[str]:
    """Return the names of the entries that share the rarest words with a text."""
    words = _words(text)
    shared = {name: words & _words(str(row)) for name, row in rows.items()}
    counts = Counter(chain.from_iterable(shared.values()))

    rarities = {
        word: log(len(rows) / count)
        for word, count in counts.items()
        if count <= _COMMON * len(rows)
    }
    scores = {
        name: sum(rarities[word] for word in common & rarities.keys())
        for name, common in shared.items()
    }
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:_NEAREST]
    return {name for name in best if scores[name] > _NEAR * scores[best[0]]}


def _words(text: str) -> set[str]:
    """Return the words of a text in their singular, without its shortest ones."""
    words = re.findall(rf"[a-z0-9]{{{_LEAST_WORD},}}", text.casefold())
    return {word.removesuffix("s") for word in words}


def _fits(text: str, wording: str) -> bool:
    """Return whether a wording contains a text, or else every word of the text as a whole word.

    Case does not matter. A text below 5 characters matches whole words only, one below 3 nothing.
    """
    text = " ".join(text.casefold().split())
    wording = wording.casefold()
    if len(text) < _LEAST_WORD:
        return False

    if len(text) >= _LEAST_PART and text in wording:
        return True
    return all(re.search(rf"\b{re.escape(word)}\b", wording) for word in text.split())


def _claim_blocks(claim: Claim) -> Blocks:
    yield Record(claim)
    yield bold(claim.id) + f"  {claim.verdict} {claim.versions}\n"
    yield from _paragraphs(Claim=claim.says, Why=claim.why, Instead=claim.instead)
    yield from section("Evidence", _evidence_rows(claim.evidence))


def _fix_blocks(fix: Fix) -> Blocks:
    fields = {name: getattr(fix, name) for name in _FIX_FACTS.split()}
    diffs = []
    for example in fix.examples:
        diff = unified_diff(example.path, example.before, example.after)
        diffs.append({"version": example.version, "diff": diff})

    yield {**fields, "examples": diffs}

    yield bold(fix.id) + f"  {fix.title}\n"
    yield from _paragraphs(Symptom=fix.symptom, Why=fix.why, Upstream=fix.upstream)
    needs = [
        (need.versions, need.severity.value, need.limits, need.reason)
        for need in fix.needs
    ]
    yield from section("Needed", needs)
    yield from section("Evidence", _evidence_rows(fix.evidence))

    for row in diffs:
        yield bold("Before and after") + f", as in {row['version']}"
        yield Data(row["diff"])


def _evidence_rows(evidence: Sequence[Evidence]) -> _Rows:
    return [(item.established, item.claim, item.source) for item in evidence]


def _paragraphs(**texts: str) -> Blocks:
    for title, text in texts.items():
        yield from section(title, [(paragraph,) for paragraph in text.split("\n")])


def _read_symptoms(text: str) -> list[Diagnosis]:
    """Return the symptom with this id; or else read the text as a log, and return its symptoms."""
    if symptom := symptoms().get(text):
        return [_unmet(symptom)]
    return list(read_log([text.encode(errors="replace")], whole=False).diagnoses)


def _unmet(symptom: Symptom) -> Diagnosis:
    """Return the diagnosis of a symptom without a log: all of its causes are possible."""
    hit = Hit(0, "", "", {})
    return Diagnosis(symptom=symptom, hit=hit, causes=symptom.cause, values={})


def _symptom_blocks(diagnoses: Sequence[Diagnosis]) -> Blocks:
    """Yield each symptom with its messages, causes and cures; one record has all for --json."""
    fields = []
    for number, diagnosis in enumerate(diagnoses):
        findings = {
            "decided": diagnosis.decided,
            "causes": diagnosis.causes,
            "values": diagnosis.values,
        }
        fields.append(record_fields(diagnosis.symptom, "cause") | findings)
        if number:
            yield ""
        yield from _symptom_lines(diagnosis)

    yield {"symptoms": fields}


def _symptom_lines(diagnosis: Diagnosis) -> Lines:
    symptom = diagnosis.symptom
    title = f"  {diagnosis.filled(symptom.title)}"

    if symptom.follows:
        title += ", which follows from another error: look before it"
    yield bold(symptom.id) + title

    for text in symptom.says[:3]:
        yield dim(f"  {text}")

    if len(diagnosis.causes) > 1:
        yield "One of these, the likeliest first:"
    for cause in diagnosis.causes:
        yield from _cause_lines(diagnosis, cause)


def _cause_lines(diagnosis: Diagnosis, cause: Cause) -> Lines:
    """Yield a cause, its cure and its source; ``tell`` only if the symptom has several causes."""
    margin = " " * 6
    yield ""
    yield bold("why   ") + diagnosis.filled(cause.cause)
    if cause.when:
        yield dim(f"{margin}where: {describe_condition(cause.when)}")
    yield bold("cure  ") + diagnosis.filled(cause.cure)
    if cause.command:
        yield margin + diagnosis.pasted(cause.command)
    if cause.costs:
        yield f"{margin}costs {cause.costs}"
    if cause.tell and len(diagnosis.causes) > 1:
        yield f"{margin}to tell: " + diagnosis.pasted(cause.tell)

    is_follower = diagnosis.symptom.follows
    confidence = "" if is_follower else f", confidence {cause.confidence}"
    yield dim(f"{margin}{cause.evidence}{confidence}: {cause.source}")
