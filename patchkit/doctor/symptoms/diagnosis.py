"""Decide what caused the symptoms of a log, by its texts and by facts.

Causes that neither texts nor facts exclude are candidates: none of them is claimed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter

from patchkit.doctor.symptoms.scan import (
    BEFORE,
    BEHIND,
    Hit,
    Scan,
    merged_scan,
    scan,
)
from patchkit.doctor.symptoms.server_life import Life, server_lives, unsurvived_hits
from patchkit.doctor.symptoms.symptom import (
    Cause,
    LogFact,
    Symptom,
    TextPattern,
    log_words,
    symptoms,
    text_pattern,
)
from patchkit.frozen import frozen
from patchkit.quoting import quoted
from patchkit.runtime.rules.rule import Condition, Situation, is_met

_EXCEPTION = TextPattern(
    "an exception",
    ("error", "exception", "timeoutexpired"),
    r"^(?!\S*Cancelled)[A-Za-z_][\w.]{0,200}(?:Error|Exception|TimeoutExpired)"
    r"(?:\([\w.]{1,200}\))?(?::\s|$)",
    flags=re.MULTILINE,
)
# How programs begin the line of any error.
_ERROR_BEGINNINGS = (
    "{name}Error: ",
    "{name}Exception: ",
    "NCCL WARN ",
    "CUDA error: ",
    ": error: ",
    "fatal error: ",
    "Fatal Python error: ",
    "panicked at ",
    "terminate called",
    "core dumped",
)
_ERRORS = (_EXCEPTION, *map(text_pattern, _ERROR_BEGINNINGS))
_MILD = (
    "DEBUG",
    "INFO",
    "WARNING",
    "WARN",
)  # an error that is logged so was caught
_LEVELS = ("error", "warning", "note")
_VERSION = re.compile(r"v?(\d+(?:[.-]\d+)+)")
_by_number = attrgetter("number")


@frozen
class Diagnosis:
    """A symptom in a log: its first hit, the number of hits, and its causes.

    ``causes`` is one if text and facts decide, else all that may hold; it is empty if no known
    cause holds. ``outlived`` says that the server served on.
    """

    symptom: Symptom
    hit: Hit
    count: int
    causes: tuple[Cause, ...]
    outlived: bool = False

    @property
    def level(self) -> str:
        """Return how bad it is: a note if the server outlived it."""
        return "note" if self.outlived else self.symptom.level

    @property
    def is_root(self) -> bool:
        """Return whether it is an error that need not follow from another one."""

        is_consequence = self.symptom.follows or self.symptom.yields
        return self.level == "error" and not is_consequence

    @property
    def decided(self) -> bool:
        """Return whether one cause is left."""
        return len(self.causes) == 1

    @property
    def rank(self) -> tuple[int, bool, bool, bool, int]:
        """Return a key that sorts first causes first."""
        return (
            _LEVELS.index(self.level),
            self.symptom.follows,
            self.symptom.yields,
            self.symptom.ends,
            self.hit.number,
        )

    def filled(self, text: str) -> str:
        """Return a text of the symptom with the values of the {names} of its pattern.

        A value between backticks is quoted for a shell: it comes from a log.
        """
        parts = text.split("`")
        for number, part in enumerate(parts):
            is_command = number % 2 == 1
            for name, value in self.hit.values.items():
                shown = value or "?"
                if is_command:
                    shown = quoted(shown)
                part = part.replace(f"{{{name}}}", shown)
            parts[number] = part
        return "`".join(parts)

    def pasted(self, command: str) -> str:
        """Return a command of a cause between backticks, "" for none."""
        return self.filled(f"`{command}`") if command else ""


@frozen
class ReadLog:
    """The diagnoses of a log, the first cause first.

    ``strange`` is the first unknown error, if no known root error explains it. The last start is
    judged: its server serves from the line ``serving`` on (0: never) and was ``stopped`` in order
    (0: never). ``earlier`` is the first error of the start before it, ``begun`` counts all starts.
    ``lines`` are the lines around the diagnoses.
    """

    diagnoses: tuple[Diagnosis, ...]
    strange: Hit | None = None
    unread: str = ""
    serving: int = 0
    stopped: int = 0
    begun: int = 0
    earlier: Hit | None = None
    lines: Mapping[int, str] = field(default_factory=dict)

    @property
    def first(self) -> Diagnosis | None:
        """Return the first error if it is a known one, else None."""
        if self.strange or not self.diagnoses:
            return None
        diagnosis = self.diagnoses[0]
        return diagnosis if diagnosis.level == "error" else None

    @property
    def lead(self) -> Hit | None:
        """Return the error to look at first, known or not; None without one."""
        return self.strange or (self.first.hit if self.first else None)


def read_log(
    chunks: Iterable[bytes],
    machine_facts: Situation | None = None,
    *,
    whole: bool = True,
) -> ReadLog:
    """Return the diagnoses of a log.

    ``machine_facts`` complete the facts that the log states. Give ``whole=False`` for a part of a
    log, such as one line: a text that is missing there proves nothing.
    Raise what ``chunks`` raises, HostError if grep does not run.
    """
    notes = set[str]()
    for symptom in symptoms().values():
        if symptom.level == "note":
            notes.update(symptom.says)

    marks = log_words().marks
    starts = {*marks["start"], *marks["worker"]}
    log = scan(chunks, _searched_texts(), notes, starts)

    facts = machine_facts or {}
    judged = _judge_start(log.streams, log.answered, facts, whole)

    if log.before:
        former = _judge_start(log.before, {}, facts, whole)
        judged = _choose_start(judged, former)

    return replace(
        judged,
        unread=log.unread,
        begun=log.begun.total(),
    )


def _choose_start(latest: ReadLog, former: ReadLog) -> ReadLog:
    """Return the start that tells more: the former one if nothing is known of the latest one."""
    if former.lead and not latest.lead and not latest.serving:
        return former
    return replace(latest, earlier=former.lead)


def _searched_texts() -> list[TextPattern]:
    """Return the texts of all symptoms, causes, facts, marks and errors, each once."""
    texts: list[str] = []
    for symptom in symptoms().values():
        texts += symptom.says
        for cause in symptom.cause:
            texts += (*cause.seen, *cause.unseen)
    for fact in log_words().fact:
        texts += fact.says
    for mark_texts in log_words().marks.values():
        texts += mark_texts
    patterns = (*map(text_pattern, texts), *_ERRORS)
    return list(dict.fromkeys(patterns))


def _judge_start(
    streams: Mapping[str, Scan],
    answered: Mapping[str, int],
    machine_facts: Situation,
    whole: bool,
) -> ReadLog:
    """Return the diagnoses of one start."""
    log = merged_scan(streams)
    # A log may come from another machine: its facts count more.
    facts = {**machine_facts, **_stated_facts(log)}

    lives = server_lives(streams, answered)

    diagnoses = []
    for diagnosis in _diagnose(_Evidence(log, facts, whole)):
        unsurvived = list(unsurvived_hits(diagnosis.symptom, streams, lives))
        hit = min(unsurvived, key=_by_number, default=diagnosis.hit)
        diagnosis = replace(diagnosis, hit=hit, outlived=not unsurvived)
        diagnoses.append(diagnosis)

    diagnoses.sort(key=attrgetter("rank"))
    hits = [diagnosis.hit for diagnosis in diagnoses]

    strange = None
    if not any(diagnosis.is_root for diagnosis in diagnoses):
        strange_hits = _strange_hits(log, streams, lives)
        strange = min(strange_hits, key=_by_number, default=None)

    if strange:
        hits.append(strange)

    serving = [life for life in lives.values() if life.serving]
    return ReadLog(
        diagnoses=tuple(diagnoses),
        strange=strange,
        serving=min((life.serving for life in serving), default=0),
        stopped=min((life.stopped for life in serving), default=0),
        lines=_lines_around(hits, log.lines),
    )


def _lines_around(
    hits: Collection[Hit],
    lines: Mapping[int, str],
) -> dict[int, str]:
    shown = {}
    for number in sorted(lines):
        if any(-BEFORE <= number - hit.number <= BEHIND for hit in hits):
            shown[number] = lines[number]
    return shown


def _stated_facts(log: Scan) -> dict[str, str]:
    """Return the facts that a log states, without those of which it states two values."""
    stated: dict[str, set[str]] = {}
    for fact in log_words().fact:
        values = stated.setdefault(fact.name, set())
        for hit in log.hits_of(fact.says):
            values.add(_stated_value(fact, hit))
        values.discard("")

    return {name: values.pop() for name, values in stated.items() if len(values) == 1}


def _stated_value(fact: LogFact, hit: Hit) -> str:
    """Return ``7.0.0.1019`` of ``7.0.0-1019-nvidia``, ``2.28.9`` of ``2.28.9+cuda13.0``."""
    version = _VERSION.match(hit.values.get("value") or "")
    if fact.value or version is None:
        return fact.value
    return version[1].replace("-", ".")


def _strange_hits(
    log: Scan,
    streams: Mapping[str, Scan],
    lives: Mapping[str, Life],
) -> Iterator[Hit]:
    """Yield the errors that are no symptom's, and that no server outlived."""
    known_lines = set[int]()
    for symptom in symptoms().values():
        for hit in log.hits_of(symptom.says):
            last = hit.number + hit.text.count("\n")
            known_lines.update(range(hit.number, last + 1))

    for name, part in streams.items():
        for hit in part.hits_of(error.text for error in _ERRORS):
            was_caught = hit.level in _MILD
            is_known = hit.number in known_lines
            outlived = lives[name].outlived(hit.number, hit.number)
            if not (was_caught or is_known or outlived):
                yield hit


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What decides between causes: texts, facts, and whether the log is whole."""

    log: Scan
    facts: Situation
    whole: bool

    def possible_causes(
        self,
        symptom: Symptom,
        hit: Hit,
    ) -> tuple[Cause, ...]:
        """Return the one cause that is proved, else those that are not excluded."""
        causes: list[Cause] = []
        for cause in symptom.cause:
            if self._excludes(cause, hit):
                continue
            if self._proves(cause) and not causes:
                return (cause,)
            causes.append(cause)
        return tuple(causes)

    def _excludes(self, cause: Cause, hit: Hit) -> bool:
        """Return whether a fact, the text, or the rest of the log speaks against a cause."""
        if not is_met(self._known_conditions(cause), self.facts):
            return True

        if not re.search(cause.matches, hit.text):
            return True

        if self.whole and not self._has_all(cause.seen):
            return True
        texts = self.log.hits.keys()
        return not texts.isdisjoint(cause.unseen)

    def _proves(self, cause: Cause) -> bool:
        """Return whether no condition is unknown of a cause that is not excluded."""
        has_text = cause.matches or cause.seen or cause.unseen
        if not (cause.when or has_text):
            return False  # the default holds where no other cause does
        if len(self._known_conditions(cause)) < len(cause.when):
            return False
        if self.whole:
            return True
        return self._has_all(cause.seen) and not cause.unseen

    def _known_conditions(self, cause: Cause) -> Condition:
        return {
            fact: values for fact, values in cause.when.items() if self.facts.get(fact)
        }

    def _has_all(self, texts: Iterable[str]) -> bool:
        return self.log.hits.keys() >= {*texts}


# The weight of the most specific text in each line, by the line's number.
_Weights = Mapping[int, int]


def _diagnose(evidence: _Evidence) -> Iterator[Diagnosis]:
    """Yield the symptoms of a log, except those whose lines another symptom explains better."""
    log = evidence.log
    weights: dict[str, _Weights] = {}
    for symptom in symptoms().values():
        if by_line := _weights_by_line(symptom, log):
            weights[symptom.id] = by_line

    present = [symptoms()[name] for name in weights]
    for symptom in present:
        if any(_hides(rival, symptom, weights) for rival in present):
            continue

        hit = min(log.hits_of(symptom.says), key=_by_number)
        yield Diagnosis(
            symptom=symptom,
            hit=hit,
            count=log.count(*symptom.says),
            causes=evidence.possible_causes(symptom, hit),
        )


def _weights_by_line(symptom: Symptom, log: Scan) -> _Weights:
    by_line: dict[int, int] = {}
    for text in symptom.says:
        weight = text_pattern(text).weight

        for hit in log.hits_of([text]):
            heaviest = by_line.get(hit.number, 0)
            by_line[hit.number] = max(weight, heaviest)
    return by_line


def _hides(
    rival: Symptom,
    symptom: Symptom,
    weights: Mapping[str, _Weights],
) -> bool:
    """Return whether a rival has a more specific text in each line of a symptom.

    A rival that is benign, or tells of another error, never hides an error.
    """
    rival_rank = (_LEVELS.index(rival.level), rival.follows)
    if rival_rank > (_LEVELS.index(symptom.level), symptom.follows):
        return False

    rival_weights = weights[rival.id]
    return all(
        rival_weights.get(line, 0) > weight
        for line, weight in weights[symptom.id].items()
    )
