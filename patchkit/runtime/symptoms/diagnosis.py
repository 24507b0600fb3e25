"""Decide what caused the symptoms that were found, by the text and by facts.

Where those do not decide, the causes that are left are candidates: nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from patchkit.quoting import quoted
from patchkit.runtime.rules.condition import Situation, decided
from patchkit.runtime.symptoms.log_facts import fact_texts, facts_of
from patchkit.runtime.symptoms.said import said
from patchkit.runtime.symptoms.scan import Hit, Scan, scan
from patchkit.runtime.symptoms.symptom import Cause, Symptom, symptoms

# How programs begin the line of an error, whatever it is.
_ERRORS = (
    *("{name}Error: ", "{name}Exception: ", "NCCL WARN ", "CUDA error: ", "fatal error: "),
    *("terminate called", "core dumped"),
)
_LEVELS = ("error", "warning", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A symptom in a log: where it was first, how often, and what caused it.

    ``causes`` is one if text and facts decide it, else those that are left; empty if none of those
    that are known holds.
    """

    symptom: Symptom
    hit: Hit
    count: int
    causes: tuple[Cause, ...]

    @property
    def decided(self) -> bool:
        """Return whether one cause is left."""
        return len(self.causes) == 1

    def filled(self, text: str) -> str:
        """Return a text of the symptom's with what stood at the {names} of its pattern.

        Between backticks that is quoted for a shell: it comes from a log.
        """
        parts = text.split("`")
        for number, part in enumerate(parts):
            for name, value in self.hit.values.items():
                shown = quoted(value or "?") if number % 2 else value or "?"
                part = part.replace(f"{{{name}}}", shown)
            parts[number] = part
        return "`".join(parts)

    def pasted(self, command: str) -> str:
        """Return a command of a cause between backticks, "" for none."""
        return self.filled("`".join(("", command, ""))) if command else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLog:
    """What was found in a log: diagnoses, the first cause first, and the facts that it states.

    ``strange`` is the first error that nobody knows, if nothing that is known explains it.
    """

    diagnoses: tuple[Diagnosis, ...]
    facts: Mapping[str, str]
    strange: Hit | None = None
    unread: str = ""

    @property
    def first(self) -> Diagnosis | None:
        """Return the first error that tells of no other one; None without such."""
        best = next(iter(self.diagnoses), None)
        return best if best and best.symptom.level == "error" else None


def read_log(
    chunks: Iterable[bytes], known: Situation | None = None, *, whole: bool = True
) -> ReadLog:
    """Return what is known of what a log says.

    ``known`` are facts of the machine, beside those that the log itself states. Of a log that is
    not ``whole``, such as a line of it, what is not there says nothing. Raises what ``chunks``
    raises, HostError if grep does not run.
    """
    entries = symptoms()
    needed = chain.from_iterable(
        (*each.says, *chain.from_iterable((*c.seen, *c.unseen) for c in each.cause))
        for each in entries.values()
    )
    texts = {text: said(text) for text in needed} | {each.text: each for each in fact_texts()}
    texts |= {text: said(text) for text in _ERRORS}
    notes = chain.from_iterable(each.says for each in entries.values() if each.level == "note")
    found = scan(chunks, [*texts.values()], frozenset(notes))
    # What a log states of itself counts more than what is known of where it is read.
    facts = {**(known or {}), **facts_of(found)}
    diagnoses = sorted(_diagnoses(entries.values(), found, facts, whole=whole), key=_order)
    known_error = any(each.symptom.level == "error" for each in diagnoses)
    strange = (
        None
        if known_error
        else min(
            (hit for text in _ERRORS for hit in found.hits.get(text, ())),
            key=lambda each: each.number,
            default=None,
        )
    )
    return ReadLog(diagnoses=tuple(diagnoses), facts=facts, strange=strange, unread=found.unread)


def _order(diagnosis: Diagnosis) -> tuple[int, bool, int]:
    return *_rank(diagnosis.symptom), diagnosis.hit.number


def _rank(symptom: Symptom) -> tuple[int, bool]:
    return _LEVELS.index(symptom.level), symptom.follows


def _diagnoses(
    entries: Collection[Symptom], found: Scan, facts: Situation, *, whole: bool
) -> Iterator[Diagnosis]:
    """Yield the symptoms, without those of which another one says more."""
    places = {each.id: _places(each, found) for each in entries}
    for entry in entries:
        mine = places[entry.id]
        # What tells of another error, or is benign, never hides an error.
        rivals = (each for each in entries if _rank(each) <= _rank(entry))
        if not mine or any(_says_more(places[each.id], mine) for each in rivals):
            continue
        hits = (hit for text in entry.says for hit in found.hits.get(text, ()))
        yield Diagnosis(
            symptom=entry,
            hit=min(hits, key=lambda each: each.number),
            count=sum(found.counts.get(text, 0) for text in entry.says),
            causes=_causes(entry, found, facts, whole=whole),
        )


def _places(entry: Symptom, found: Scan) -> dict[int, int]:
    """Return the lines that a symptom begins in, each with the weight of its text."""
    places: dict[int, int] = {}
    for text in entry.texts:
        for hit in found.hits.get(text.text, ()):
            places[hit.number] = max(text.weight, places.get(hit.number, 0))
    return places


def _says_more(other: Mapping[int, int], mine: Mapping[int, int]) -> bool:
    """Return whether another symptom says more of each line that this one is in."""
    return all(other.get(line, 0) > weight for line, weight in mine.items())


def _causes(entry: Symptom, found: Scan, facts: Situation, *, whole: bool) -> tuple[Cause, ...]:
    """Return the cause that holds, or those that may: the default one if no other does."""
    open_ones: list[Cause] = []
    for each in entry.cause:
        if each.is_default:
            open_ones.append(each)
            continue
        holds = _holds(each, found, facts, whole=whole)
        if holds and not open_ones:
            return (each,)
        if holds is not False:
            open_ones.append(each)
    return tuple(open_ones)


def _holds(cause: Cause, found: Scan, facts: Situation, *, whole: bool) -> bool | None:
    """Return whether a cause's conditions are met, None if that is not known."""
    met: list[bool | None] = [decided(cause.when, facts)]
    met += [found.has(text) or (False if whole else None) for text in cause.seen]
    met += [False if found.has(text) else (True if whole else None) for text in cause.unseen]
    if False in met:
        return False
    return None if None in met else True
