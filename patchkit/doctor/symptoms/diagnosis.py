"""Decide what caused the symptoms that were found, by the text and by facts.

Where those do not decide, the causes that are left are candidates: nothing is claimed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from operator import attrgetter

from patchkit.doctor.symptoms.scan import BEFORE, BEHIND, Hit, Scan, merged_scan, scan
from patchkit.doctor.symptoms.symptom import (
    Cause,
    PatternText,
    Symptom,
    TextPattern,
    symptoms,
    text_pattern,
)
from patchkit.quoting import quoted
from patchkit.records import RECIPES, read_toml
from patchkit.runtime.rules.rule import Situation, holds

# How programs begin the line of an error, whatever it is.
_EXCEPTION = TextPattern(
    "an exception",
    ("error", "exception", "timeoutexpired"),
    r"^(?!\S*Cancelled)[A-Za-z_][\w.]{0,200}(?:Error|Exception|TimeoutExpired)"
    r"(?:\([\w.]{1,200}\))?(?::\s|$)",
    flags=re.MULTILINE,
)
_ERRORS = (
    _EXCEPTION,
    *map(
        text_pattern,
        ("{name}Error: ", "{name}Exception: ", "NCCL WARN ", "CUDA error: "),
    ),
    *map(
        text_pattern,
        (": error: ", "fatal error: ", "Fatal Python error: ", "panicked at "),
    ),
    *map(text_pattern, ("terminate called", "core dumped")),
)
_MILD = ("DEBUG", "INFO", "WARNING", "WARN")  # what is logged so was caught
_LEVELS = ("error", "warning", "note")
_NUMBERS = re.compile(r"v?(\d+(?:[.-]\d+)+)")
_number = attrgetter("number")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFact:
    """A fact that a log may state: ``value``, or what stands at {value} of the text."""

    name: str
    says: tuple[PatternText, ...]
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogWords:
    """What logs are asked; ``marks`` are the texts that tell of a server's life, by name."""

    fact: tuple[LogFact, ...]
    marks: Mapping[str, tuple[PatternText, ...]]


@cache
def log_words() -> LogWords:
    """Return the words of recipes/doctor/logs.toml."""
    return read_toml(LogWords, RECIPES / "doctor" / "logs.toml")


@dataclass(slots=True, kw_only=True)
class Life:
    """The lines from which on a server served, answered last, and was stopped: 0 for never.

    ``ended`` says that something ended it while it served.
    """

    serving: int
    answered: int
    stopped: int
    ended: bool = False

    def outlived(self, first: int, last: int) -> bool:
        """Return whether the server outlived what stands in the lines ``first`` to ``last``."""
        if not self.serving:
            return False
        if last < self.serving or 0 < self.stopped < first:
            return True
        return last < self.answered and not self.ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A symptom in a log: where it was first, how often, and what caused it.

    ``causes`` is one if text and facts decide it, else those that are left; empty if none of those
    that are known holds. A server outlived what is ``outlived``.
    """

    symptom: Symptom
    hit: Hit
    count: int
    causes: tuple[Cause, ...]
    outlived: bool = False

    @property
    def level(self) -> str:
        """Return how bad it is: what a server outlived is worth a note."""
        return "note" if self.outlived else self.symptom.level

    @property
    def is_root(self) -> bool:
        """Return whether it is an error that need not follow from another one."""
        return self.level == "error" and not (
            self.symptom.follows or self.symptom.yields
        )

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
    """What was found in a log: diagnoses, the first cause first.

    ``strange`` is the first error that nobody knows, if no root that is known explains it. Judged
    is the last start, whose server serves from the line ``serving`` on (0: it never did) and was
    ``stopped`` in order; ``earlier`` is the first error of the start before it, ``begun`` counts
    all. ``lines`` are those around what was found.
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
        """Return the first error that tells of no other one; None without such."""
        best = next(iter(self.diagnoses), None)
        return best if best and best.level == "error" and not self.strange else None

    @property
    def lead(self) -> Hit | None:
        """Return the error to look at first, known or not; None without one."""
        return self.strange or (self.first.hit if self.first else None)


def read_log(
    chunks: Iterable[bytes], known: Situation | None = None, *, whole: bool = True
) -> ReadLog:
    """Return what is known of what a log says.

    ``known`` are facts of the machine, beside those that the log itself states. Of a log that is
    not ``whole``, such as a line of it, what is not there says nothing. Raises what ``chunks``
    raises, HostError if grep does not run.
    """
    entries = symptoms().values()
    needed = chain(
        chain.from_iterable(entry.says for entry in entries),
        chain.from_iterable(
            (*c.seen, *c.unseen) for entry in entries for c in entry.cause
        ),
        chain.from_iterable(fact.says for fact in log_words().fact),
        chain.from_iterable(log_words().marks.values()),
    )
    texts = {text: text_pattern(text) for text in needed} | {
        text.text: text for text in _ERRORS
    }
    notes = {text for entry in entries if entry.level == "note" for text in entry.says}
    starts = {*log_words().marks["start"], *log_words().marks["worker"]}
    log = scan(chunks, [*texts.values()], notes, starts)
    judged = _judge_start(log.streams, log.answered, known or {}, whole=whole)
    if log.before:
        before = _judge_start(log.before, {}, known or {}, whole=whole)
        if not judged.lead and not judged.serving and before.lead:
            judged = before
        else:
            judged = replace(judged, earlier=before.lead)
    return replace(judged, unread=log.unread, begun=sum(log.begun.values()))


def _judge_start(
    streams: Mapping[str, Scan],
    answered: Mapping[str, int],
    known: Situation,
    *,
    whole: bool,
) -> ReadLog:
    """Return what is known of one start."""
    entries = symptoms().values()
    found = merged_scan(streams)
    stated: dict[str, set[str]] = {}
    for fact in log_words().fact:
        for hit in found.hits_of(fact.says):
            # ``7.0.0.1019`` of ``7.0.0-1019-nvidia``, ``2.28.9`` of ``2.28.9+cuda13.0``.
            number = _NUMBERS.match(hit.values.get("value") or "")
            if value := fact.value or (number[1].replace("-", ".") if number else ""):
                stated.setdefault(fact.name, set()).add(value)
    # What a log states of itself counts more than what is known of where it is read, but for
    # facts of which it states two.
    facts = {
        **known,
        **{k: values.pop() for k, values in stated.items() if len(values) == 1},
    }
    endings = {text for entry in entries if entry.ends for text in entry.says}
    lives = _stream_lives(streams, answered, endings)
    diagnoses = []
    for diagnosis in _diagnose(entries, found, facts, whole=whole):
        left = [*_unsurvived_hits(diagnosis.symptom, streams, lives)]
        hit = min(left, key=_number, default=diagnosis.hit)
        diagnoses.append(replace(diagnosis, outlived=not left, hit=hit))
    diagnoses.sort(key=lambda its: its.hit.number)
    diagnoses.sort(
        key=lambda its: (its.symptom.follows, its.symptom.yields, its.symptom.ends)
    )
    diagnoses.sort(key=lambda its: _LEVELS.index(its.level))
    strange = None
    if not any(diagnosis.is_root for diagnosis in diagnoses):
        strange = min(
            _strange_hits(entries, found, streams, lives), key=_number, default=None
        )
    hits = [diagnosis.hit for diagnosis in diagnoses] + ([strange] if strange else [])
    serving = [life for life in lives.values() if life.serving]
    return ReadLog(
        diagnoses=tuple(diagnoses),
        strange=strange,
        serving=min((life.serving for life in serving), default=0),
        stopped=min((life.stopped for life in serving), default=0),
        lines={
            number: text
            for number, text in sorted(found.lines.items())
            if any(hit.number - BEFORE <= number <= hit.number + BEHIND for hit in hits)
        },
    )


def _stream_lives(
    streams: Mapping[str, Scan], answered: Mapping[str, int], endings: Collection[str]
) -> Mapping[str, Life]:
    """Return the life of each stream's server; ``endings`` are texts of what ends one.

    A stream without a server of its own, such as a worker's, lives as the first that serves.
    """
    lives, marks = {}, log_words().marks
    for name, part in streams.items():
        serving = min((hit.number for hit in part.hits_of(marks["serving"])), default=0)
        if any(hit.number < serving for hit in part.hits_of(endings)):
            serving = (
                0  # it ended before and did not begin anew: that is another program
            )
        stopped = max(part.last.get(text, 0) for text in marks["stopped"])
        stopped = stopped if stopped > serving else 0
        lives[name] = Life(
            serving=serving, answered=answered.get(name, 0), stopped=stopped
        )
    served = [life for life in lives.values() if life.serving]
    for name, part in streams.items():
        if served and not (lives[name].serving or any(part.hits_of(marks["start"]))):
            lives[name] = min(served, key=attrgetter("serving"))
    for name, life in lives.items():
        life.ended |= any(
            streams[name].last.get(text, 0) > life.serving for text in endings
        )
    return lives


def _unsurvived_hits(
    symptom: Symptom, streams: Mapping[str, Scan], lives: Mapping[str, Life]
) -> Iterator[Hit]:
    """Yield the first hit of each stream whose server did not outlive a symptom."""
    for stream, part in streams.items():
        hits = sorted(part.hits_of(symptom.says), key=_number)
        if not hits:
            continue
        life = lives[stream]
        later = [hit for hit in hits if hit.number > life.serving] or hits
        last = max(part.last.get(text, 0) for text in symptom.says)
        if symptom.lasts:
            yield hits[0]
        elif not (life.serving and symptom.request) and not life.outlived(
            later[0].number, last
        ):
            yield later[0]


def _strange_hits(
    entries: Collection[Symptom],
    found: Scan,
    streams: Mapping[str, Scan],
    lives: Mapping[str, Life],
) -> Iterator[Hit]:
    """Yield the errors that no symptom tells of, and that no server outlived."""
    known = {
        hit.number + more
        for entry in entries
        for hit in found.hits_of(entry.says)
        for more in range(hit.text.count("\n") + 1)
    }
    for stream, part in streams.items():
        for hit in part.hits_of(error.text for error in _ERRORS):
            caught = hit.level in _MILD or hit.number in known
            if not caught and not lives[stream].outlived(hit.number, hit.number):
                yield hit


def _diagnose(
    entries: Collection[Symptom], found: Scan, facts: Situation, *, whole: bool
) -> Iterator[Diagnosis]:
    """Yield the symptoms, without those of which another one says more."""
    # The lines that each begins in, with the weight of its text.
    places: dict[str, dict[int, int]] = {}
    for entry in entries:
        lines = places.setdefault(entry.id, {})
        for text in map(text_pattern, entry.says):
            for hit in found.hits.get(text.text, ()):
                lines[hit.number] = max(text.weight, lines.get(hit.number, 0))
    ranks = {entry.id: (_LEVELS.index(entry.level), entry.follows) for entry in entries}
    for entry in entries:
        mine = places[entry.id]
        # What tells of another error, or is benign, never hides an error.
        rivals = [
            places[name] for name, rank in ranks.items() if rank <= ranks[entry.id]
        ]
        if not mine or any(
            all(other.get(line, 0) > weight for line, weight in mine.items())
            for other in rivals
        ):
            continue
        hit = min(found.hits_of(entry.says), key=_number)
        # The cause that holds, or those that may: the default one if no other does.
        causes: list[Cause] = []
        for cause in entry.cause:
            known = {
                key: values for key, values in cause.when.items() if facts.get(key)
            }
            # None if that hangs on a fact that is not known; one that is not met decides.
            met = [holds(known, facts) and (len(known) == len(cause.when) or None)]
            met += [re.search(cause.matches, hit.text) is not None]
            # What is not there says nothing of a log that is not whole.
            absent = False if whole else None
            met += [True if text in found.hits else absent for text in cause.seen]
            met += [
                False if text in found.hits else (whole or None)
                for text in cause.unseen
            ]
            if not (cause.when or cause.matches or cause.seen or cause.unseen):
                met = [None]  # it holds where no other cause does
            decides = all(met) and not causes
            if False not in met:
                causes.append(cause)
            if decides:
                break
        count = found.count(*entry.says)
        yield Diagnosis(symptom=entry, hit=hit, count=count, causes=tuple(causes))
