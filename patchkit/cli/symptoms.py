"""Show what a symptom means: by its id, or by the text that somebody met."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from patchkit.cli.out import record_fields, shown, style
from patchkit.cli.render import Block, Record
from patchkit.doctor.symptoms.diagnosis import Diagnosis, read_log
from patchkit.doctor.symptoms.scan import Hit
from patchkit.doctor.symptoms.symptom import Symptom, symptoms
from patchkit.runtime.rules.rule import in_words

_FEWEST = 5  # characters of a text that is looked for in what symptoms say


def explained_symptoms(text: str) -> list[Diagnosis]:
    """Return what a text means: the symptom of that id, or those that are in it."""
    if text in symptoms():
        return [_unmet_diagnosis(symptoms()[text])]
    return list(read_log([text.encode(errors="replace")], whole=False).diagnoses)


def symptoms_with(words: str) -> list[Diagnosis]:
    """Return the symptoms that have a part of a text in what they say, or in their titles."""
    low = " ".join(words.split()).casefold()
    if len(low) < _FEWEST:
        return []
    return [
        _unmet_diagnosis(symptom)
        for symptom in symptoms().values()
        if any(low in it.casefold() for it in (*symptom.says, *symptom.example, symptom.title))
    ]


def _unmet_diagnosis(symptom: Symptom) -> Diagnosis:
    """Return a symptom that nobody met, with all its causes."""
    return Diagnosis(symptom=symptom, hit=Hit(0, "", "", {}), count=0, causes=symptom.cause)


def symptom_blocks(found: Sequence[Diagnosis]) -> Iterator[Block]:
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
        follows = ", which follows from another error: look before it" if symptom.follows else ""
        yield style(symptom.id, bold=True) + f"  {diagnosis.filled(symptom.title)}{follows}"
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
