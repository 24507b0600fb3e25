"""Decide what caused the symptoms of a log, by its texts and by facts.

If neither texts nor facts decide between causes, all that they do not exclude are candidates.
"""

import re
import sys
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from itertools import chain, takewhile
from operator import attrgetter, itemgetter

from patchkit.doctor.symptoms.lines import FORMS
from patchkit.doctor.symptoms.messages import (
    frame_causes,
    stated_options,
    stated_variables,
    states_cause,
)
from patchkit.doctor.symptoms.pins import FITS, NO_RELEASE, pinned_cause
from patchkit.doctor.symptoms.scan import (
    BEFORE,
    BEHIND,
    SEVERE_LINE,
    Answers,
    Hit,
    Scan,
    merged_scan,
    scan,
)
from patchkit.doctor.symptoms.server_life import Life, server_lives, unsurvived_hits
from patchkit.doctor.symptoms.symptom import (
    Cause,
    KernelLibrary,
    LogFact,
    Symptom,
    TextPattern,
    libraries,
    log_words,
    symptoms,
    text_pattern,
)
from patchkit.frozen import Texts, Values, frozen, positional
from patchkit.quoting import quoted
from patchkit.runtime.rules.rule import Condition, Situation, is_met

_EXCEPTION = TextPattern(
    "an exception",
    ("error", "exception", "timeoutexpired"),
    r"(?m-i:^(?!\S*Cancelled)(?:[A-Za-z_][\w.]{0,200}(?:Error|Exception|TimeoutExpired)(?:_\w+)?|Exception)"
    r"(?:\([\w.]{1,200}\))?(?::\s|$))",
)
# An exception whose name ends otherwise, in a line of the level of an error.
_RAISED = re.compile(r"(?:(?:[a-z_]\w*\.)+[A-Z]\w+|_?(?:[A-Z][a-z]+){2,})(?::\s|$)")
_TRACEBACK = "traceback"  # the library whose frame begins a traceback
_GENERAL_WEIGHT = (
    1000  # characters by which texts of general symptoms are less specific
)
_LEVELS = ("error", "warning", "note")
_MILD = FORMS["severe"]["mild"]
_by_number = attrgetter("number")

StartStep = tuple[str, str]
"""The line that tells of a step of a start, and what changes the step."""


@frozen
class Diagnosis:
    """A symptom in a log: its first hit and its causes.

    ``causes`` has one cause if texts and facts decide, else all that are possible, and none if no
    known cause is possible; ``is_proved``: the conditions of the first one hold. ``values`` are
    those of {names} in the texts. ``outlived`` says that the server went on to serve.
    """

    symptom: Symptom
    hit: Hit
    causes: tuple[Cause, ...]
    values: Values
    is_proved: bool = False
    outlived: bool = False

    @property
    def level(self) -> str:
        """Return the symptom's level, or "note" if a server outlived it or it is harmless."""
        is_harmless = self.decided and self.causes[0].harmless
        return "note" if self.outlived or is_harmless else self.symptom.level

    @property
    def is_root(self) -> bool:
        """Return whether this is an error that need not be the consequence of another error."""

        is_consequence = self.symptom.follows or self.symptom.yields
        return self.level == "error" and not is_consequence

    @property
    def decided(self) -> bool:
        """Return whether exactly one cause is possible."""
        return len(self.causes) == 1

    @property
    def is_claimed(self) -> bool:
        """Return whether the one possible cause is told as sure, and not as likely.

        Its confidence is high; where the symptom may follow from another error, it is also proved.
        """
        is_sure = self.decided and self.causes[0].confidence == "high"
        may_follow = self.symptom.yields and not self.is_proved
        return is_sure and not may_follow

    @property
    def rank(self) -> tuple[int, ...]:
        """Return a key that sorts the most likely first cause first.

        What a program logs as a warning or less comes behind its errors.
        """
        return (
            _LEVELS.index(self.level),
            self.symptom.follows,
            self.symptom.yields,
            self.symptom.ends,
            self.hit.level in _MILD,
            self.hit.number,
        )

    def filled(self, text: str) -> str:
        """Return a text of the symptom in which {names} are replaced by their values in the hit.

        A value between backticks is quoted for a shell, since values come from a log.
        """
        parts = text.split("`")
        for number, part in enumerate(parts):
            is_command = number % 2 == 1
            for name, value in self.values.items():
                shown = value or "?"
                if is_command:
                    shown = quoted(shown)
                part = part.replace(f"{{{name}}}", shown)
            parts[number] = part

        return "`".join(parts)

    def pasted(self, command: str) -> str:
        """Return a filled-in command between backticks, "" for an empty command."""
        return self.filled(f"`{command}`") if command else ""


@frozen
class ReadLog:
    """The diagnoses of a log, the first cause first.

    ``strange`` is the first error that no symptom describes; None if a diagnosis is a root error.
    ``family`` is the line of an unknown error → the causes that its traceback shows.
    The last start of a server is judged: the server serves from the line ``serving`` on, and was
    stopped in order at the line ``stopped``; 0 means never. ``earlier`` is the first error of the
    start before the last one, and ``begun`` the number of all starts. ``unread`` says what was not
    looked at, "" if all was. ``request`` is the first unknown error of a request that the server
    goes on after; ``broken`` says that a request was later answered as a fault of the server.
    ``ended`` is the line in which somebody ended the program by hand, ``facts`` are those of the
    machine and its software. ``steps`` is the number of a
    line → the step of the start that it tells of, ``options`` the options of the start, ``levers``
    what options and variables switch on.
    ``lines`` is number → text of the lines around the diagnoses.
    """

    diagnoses: tuple[Diagnosis, ...]
    strange: Hit | None
    family: Mapping[int, tuple[Cause, ...]]
    unread: str = ""
    serving: int
    stopped: int
    begun: int = 0
    earlier: Hit | None = None
    request: Hit | None = None
    broken: bool = False
    ended: int = 0
    facts: Situation
    steps: Mapping[int, StartStep]
    options: Values
    levers: Texts
    lines: Mapping[int, str]

    @property
    def first(self) -> Diagnosis | None:
        """Return the first error if a symptom describes it, else None."""
        if self.strange or not self.diagnoses:
            return None

        diagnosis = self.diagnoses[0]
        return diagnosis if diagnosis.level == "error" else None

    def step_before(self, line: float) -> StartStep | None:
        """Return the last step of the start that a line before this one tells of, if any."""
        lines = (number for number in self.steps if number < line)
        return self.steps.get(max(lines, default=0))

    @property
    def lead(self) -> Hit | None:
        """Return the error to look at first, known or unknown; None if there is no error."""
        return self.strange or (self.first.hit if self.first else None)


def read_log(
    chunks: Iterable[bytes],
    machine_facts: Situation | None = None,
    *,
    whole: bool = True,
) -> ReadLog:
    """Return the diagnoses of a log.

    ``chunks`` are pieces of the log of any size. ``machine_facts`` are used where the log states
    no fact. Give ``whole=False`` for a part of a log, such as one line: a missing text proves
    nothing there. The start before the last one is judged if only that has an error and the last
    one does not serve. Raise what ``chunks`` raises, and HostError if grep does not run.
    """
    notes = {
        text
        for symptom in symptoms().values()
        if symptom.level == "note"
        for text in symptom.says
    }
    marks = log_words().marks
    starts = {*marks["start"], *marks["worker"]}
    log = scan(chunks, _searched_texts(), notes, starts)

    facts = machine_facts or {}
    # What stands before the only banner, such as the command, is of the same start.
    command = merged_scan(log.before if log.begun <= 1 else {})
    latest = _judge_start(log.streams, log.answered, facts, whole, command)
    former = _judge_start(log.before, {}, facts, whole, command)

    judged = replace(latest, earlier=former.lead)
    if former.lead and not latest.lead and not latest.serving:
        judged = former

    return replace(
        judged,
        unread=log.unread,
        begun=log.begun,
    )


def _searched_texts() -> list[TextPattern]:
    """Return an exception's pattern and all texts of the recipes to look for, each once."""
    texts = [*chain(*log_words().marks.values())]
    for symptom in symptoms().values():
        texts += symptom.says

    for fact in log_words().fact:
        texts += fact.says

    for step in log_words().step:
        texts += step.says

    for library in libraries():
        texts += (*library.frames, *library.options, *library.without)

    parts: Iterable[Symptom | KernelLibrary] = chain(symptoms().values(), libraries())
    for part in parts:
        for cause in part.cause:
            texts += (*cause.seen, *cause.either, *cause.unseen)

    return [_EXCEPTION, *dict.fromkeys(map(text_pattern, texts))]


def _judge_start(
    streams: Mapping[str, Scan],
    answered: Answers,
    machine_facts: Situation,
    whole: bool,
    command: Scan,
) -> ReadLog:
    """Judge one start; ``command`` is a scan of the lines just before it."""
    log = merged_scan(streams)
    # The log may come from another machine, so facts in the log replace facts of this machine.
    # Memory that neither of them tells of is taken for shared with the CPU.
    facts = {"gpu_memory": "shared", **machine_facts, **_stated_facts(log)}

    lives = server_lives(streams, answered)

    diagnoses = []
    evidence = _Evidence(log, facts, whole, {*log.hits, *command.hits})
    for diagnosis in _diagnose(evidence):
        unsurvived = list(unsurvived_hits(diagnosis.symptom, streams, lives))
        hit = min(unsurvived, key=_by_number, default=diagnosis.hit)
        diagnoses.append(replace(diagnosis, hit=hit, outlived=not unsurvived))

    diagnoses.sort(key=attrgetter("rank"))
    strange, request = _first_strange(log, streams, lives, diagnoses)
    unknown = [*filter(None, (strange, request))]

    shown_numbers = set[int]()
    for hit in [diagnosis.hit for diagnosis in diagnoses] + unknown:
        shown_numbers.update(range(hit.number - BEFORE, hit.number + BEHIND + 1))

    serving = [life for life in lives.values() if life.serving]
    marks = log_words().marks
    options = chain(*(part.hits_of(marks["options"]) for part in (command, log)))
    settings = "\n".join(hit.text for hit in options)
    return ReadLog(
        diagnoses=tuple(diagnoses),
        strange=strange,
        family={hit.number: evidence.strange_causes(hit) for hit in unknown},
        request=request,
        broken=request is not None
        and request.number < log.last_line_of(marks["broken"]),
        ended=max(answered.get(("ended", name), 0) for name in ("", *streams)),
        facts=facts,
        steps={
            hit.number: (hit.text, step.cure)
            for step in log_words().step
            for hit in log.hits_of(step.says)
        },
        options=stated_options(settings),
        levers=(
            *evidence.switches(evidence.chosen_parts()),
            *stated_variables(settings),
        ),
        serving=min((life.serving for life in serving), default=0),
        stopped=min((life.stopped for life in serving), default=0),
        lines={
            number: log.lines[number]
            for number in sorted(shown_numbers & log.lines.keys())
        },
    )


def _stated_facts(log: Scan) -> Values:
    """Return fact → value as a log states them, without facts of two different values."""
    stated: dict[str, set[str]] = {}
    for fact in log_words().fact:
        values = {_stated_value(fact, hit) for hit in log.hits_of(fact.says)}
        stated.setdefault(fact.name, set()).update(values - {""})

    return {name: values.pop() for name, values in stated.items() if len(values) == 1}


def _stated_value(fact: LogFact, hit: Hit) -> str:
    """Return the fixed value of a fact, or else the one that the hit's line names.

    A build number is kept (``7.0.0-1019-nvidia`` is ``7.0.0.1019``), a local part is left out
    (``2.28.9+cuda13.0`` is ``2.28.9``). "": the pattern does not fit.
    """
    given = hit.values.get("value", "1.0")  # no {value}: the default pattern fits
    if stated := re.search(fact.pattern, given):
        return fact.value or stated[1].replace("-", ".")

    return ""


def _first_strange(
    log: Scan,
    streams: Mapping[str, Scan],
    lives: Mapping[str, Life],
    diagnoses: Iterable[Diagnosis],
) -> tuple[Hit | None, Hit | None]:
    """Return the first error that no symptom describes, and the first such one of a request.

    An error is looked for unless a root error is described. Without an exception, a line that only
    has the level of an error counts if all errors that are described follow from others, and if it
    comes before them or has the form of an exception.
    """
    evidence = (_known_lines(log), log, streams, lives)
    marks = log_words().marks
    exception_texts = (_EXCEPTION.text, *marks["error"])
    exceptions, requests = _strange_hits(exception_texts, *evidence)
    request = min(requests, key=_by_number, default=None)
    if any(diagnosis.is_root for diagnosis in diagnoses):
        return None, request

    if exceptions:
        return _stated_exception(exceptions, log), request

    errors = [row for row in diagnoses if row.level == "error"]
    if not all(row.symptom.follows for row in errors):
        return None, request

    first_error = min((row.hit.number for row in errors), default=sys.maxsize)
    failures = (SEVERE_LINE, *marks["failed"])
    lines, _requests = _strange_hits(failures, *evidence)

    if request or any(row.symptom.request for row in diagnoses):
        # Without a writer, it may be the client that tells of its failed request.
        lines = [hit for hit in lines if hit.who]

    causes = [
        hit for hit in lines if hit.number < first_error or _RAISED.match(hit.text)
    ]
    return min(causes, key=_by_number, default=None), request


def _stated_exception(exceptions: list[Hit], log: Scan) -> Hit:
    """Return the first exception that says what is wrong: the first of all, or one it led to.

    If neither does, return the first of all.
    """
    first, *others = sorted(exceptions, key=_by_number)
    if states_cause(first.text):
        return first

    link = _next_link(first, log)
    same_writer = (other for other in others if other.who == first.who)
    stated = (
        other
        for other in same_writer
        if other.number > link and states_cause(other.text)
    )
    return next(stated, first)


def _known_lines(log: Scan) -> dict[int, bool]:
    """Return the lines that a symptom describes → whether one does that may be a cause."""
    known_lines: dict[int, bool] = {}
    consequences_first = sorted(
        symptoms().values(), key=attrgetter("follows"), reverse=True
    )
    for symptom in consequences_first:
        for hit in log.hits_of(symptom.says):
            last = hit.number + hit.text.count("\n")
            numbers = range(hit.number, last + 1)
            known_lines |= dict.fromkeys(numbers, not symptom.follows)

    return known_lines


def _strange_hits(
    texts: Iterable[str],
    known_lines: Mapping[int, bool],
    log: Scan,
    streams: Mapping[str, Scan],
    lives: Mapping[str, Life],
) -> tuple[list[Hit], list[Hit]]:
    """Return the hits that no symptom describes and no program caught: errors, and of requests.

    An error that a server outlived is left out.
    """
    errors = []
    requests = []
    for name, part in streams.items():
        life = lives[name]
        for hit in part.hits_of(texts):
            if hit.level in _MILD or _is_described(hit, log, known_lines):
                continue

            if life.is_request(hit):
                requests.append(hit)
            elif not life.outlived(hit, hit.number):
                errors.append(hit)

    return errors, requests


def _is_described(
    exception: Hit,
    log: Scan,
    known_lines: Mapping[int, bool],
) -> bool:
    """Return whether a symptom describes an exception.

    An exception without a text is described if it is the direct cause of a known error.
    """
    is_known = exception.number in known_lines
    if is_known or " " in exception.text.strip():
        return is_known

    causes = [line for line, may_be_cause in known_lines.items() if may_be_cause]
    return max(causes, default=0) > _next_link(exception, log)


def _next_link(exception: Hit, log: Scan) -> int:
    """Return the number of the next line that links an exception to a later one.

    Return ``sys.maxsize`` if there is none.
    """
    links = [
        link.number
        for link in log.hits_of(log_words().marks["chained"])
        if link.who == exception.who and link.number > exception.number
    ]
    return min(links, default=sys.maxsize)


@positional
class _Evidence:
    """What decides between causes: a log, facts, whether it is whole, its texts.

    ``texts`` are those of the log, and of what was written just before the start.
    """

    log: Scan
    facts: Situation
    whole: bool
    texts: Set[str]

    def possible_causes(
        self,
        candidates: Iterable[Cause],
        hit: Hit,
    ) -> tuple[Cause, ...]:
        """Return the causes not excluded, or the first one alone if it is proved."""
        causes = [cause for cause in candidates if not self._excludes(cause, hit)]
        if causes and self.proves(causes[0]):
            del causes[1:]

        return tuple(causes)

    def traceback_parts(self, hit: Hit) -> list[KernelLibrary]:
        """Return the libraries whose frames are in the traceback of a hit, the deepest first."""
        frames = [
            (frame.number, library)
            for library in libraries()
            for frame in self.log.hits_of(library.frames)
            if 0 <= hit.number - frame.number <= library.reach and frame.who == hit.who
        ]
        frames.sort(key=itemgetter(0), reverse=True)
        parts = [library for _line, library in frames]
        return [*takewhile(lambda part: part.id != _TRACEBACK, parts)]

    def library_causes(
        self,
        parts: Iterable[KernelLibrary],
        hit: Hit,
    ) -> tuple[Cause, ...]:
        """Return the possible causes of the deepest of these libraries that has some."""
        causes = (self.possible_causes(part.cause, hit) for part in parts)
        return next(filter(None, causes), ())

    def strange_causes(self, hit: Hit) -> tuple[Cause, ...]:
        """Return what the traceback of an error that no symptom describes says of its cause."""
        parts = self.traceback_parts(hit)
        part_causes = self.library_causes(parts, hit)
        causes = frame_causes(self.lines_before(hit), hit.text, self.facts, part_causes)

        changing = (part for part in self.chosen_parts() if not part.frames)
        causes = (*self.library_causes(changing, hit), *causes)
        return self.with_switches(causes, parts)

    def chosen_parts(self) -> list[KernelLibrary]:
        """Return the parts that the log's options switch on: what does not go with them fails."""
        return [part for part in libraries() if self.has_text(part.options)]

    def has_text(self, texts: Texts) -> bool:
        """Return whether one of these texts is there."""
        return not self.texts.isdisjoint(texts)

    def switches(self, parts: Iterable[KernelLibrary]) -> Texts:
        """Return how to switch parts off, except those that the log switches off already."""
        switched_on = (part for part in parts if not self.has_text(part.without))
        switches = dict.fromkeys(part.off for part in switched_on)

        return (*filter(None, switches),)

    def with_switches(
        self,
        causes: tuple[Cause, ...],
        parts: Iterable[KernelLibrary],
    ) -> tuple[Cause, ...]:
        """Return causes whose last cure says which parts of a traceback can be switched off."""
        switches = self.switches(parts)
        if not (causes and switches):
            return causes

        cure = f"{causes[-1].cure}\nSwitch off, one after the other: {'; '.join(switches)}."
        return (*causes[:-1], replace(causes[-1], cure=cure))

    def quoted_values(
        self,
        causes: Iterable[Cause],
        hit: Hit,
    ) -> Values:
        """Return the values of {names} in a hit, and in the other texts that its causes need."""
        needed = [text for cause in causes for text in cause.seen]
        values = (other.values for other in self.log.hits_of(needed))
        return dict(ChainMap(hit.values, *values))

    def lines_before(self, hit: Hit) -> str:
        """Return the few lines before a hit, where the deepest frame of its traceback is."""
        numbers = range(hit.number - BEFORE, hit.number)
        return "\n".join(self.log.lines.get(number, "") for number in numbers)

    def _excludes(self, cause: Cause, hit: Hit) -> bool:
        """Return whether a fact, the text of the hit, or another text of the log rules it out."""
        return (
            not is_met(self._known_conditions(cause), self.facts)
            or not re.search(cause.matches, hit.text)
            or (self.whole and not self._has_evidence(cause))
            or self.has_text(cause.unseen)
        )

    def proves(self, cause: Cause) -> bool:
        """Return whether all conditions of a cause are known to hold.

        Call it only for a cause that ``_excludes`` does not exclude.
        """
        # The fact gpu_memory excludes causes, but proves none.
        facts = {*cause.when} - {"gpu_memory"}
        conditions = (facts, cause.matches, cause.seen, cause.either, cause.unseen)
        if not any(conditions):
            return False  # nothing can prove a cause without conditions

        if len(self._known_conditions(cause)) < len(cause.when):
            return False

        # For a whole log, `_excludes` has looked for the texts already.
        return self.whole or (self._has_evidence(cause) and not cause.unseen)

    def _has_evidence(self, cause: Cause) -> bool:
        """Return whether the texts have all of ``seen`` and one of ``either`` of a cause."""
        has_all = self.texts >= {*cause.seen}
        return has_all and (not cause.either or self.has_text(cause.either))

    def _known_conditions(self, cause: Cause) -> Condition:
        return {
            fact: values for fact, values in cause.when.items() if self.facts.get(fact)
        }


# Number of a line → the weight of a symptom's most specific text in that line.
_Weights = Mapping[int, int]


def _diagnose(evidence: _Evidence) -> Iterator[Diagnosis]:
    """Yield the symptoms of a log, except those whose lines another symptom explains better."""
    log = evidence.log
    weights = {
        symptom.id: by_line
        for symptom in symptoms().values()
        if (by_line := _weights_by_line(symptom, log))
    }
    present = [symptoms()[name] for name in weights]
    for symptom in present:
        if any(_hides(rival, symptom, weights) for rival in present):
            continue

        hits = sorted(log.hits_of(symptom.says), key=_by_number)
        hit = hits[0]
        if symptom.pinned:
            symptom = _with_pin(symptom, hit, evidence)

        # A harmless line excuses no other line of its symptom.
        candidates = [
            row
            for row in symptom.cause
            if not row.harmless or all(re.search(row.matches, hit.text) for hit in hits)
        ]
        causes = evidence.possible_causes(candidates, hit)
        if symptom.frames:
            # The GPU may print its reason before the traceback that says the same.
            traced = (evidence.traceback_parts(hit) for hit in hits)
            parts = next(filter(None, traced), [])
            causes = evidence.library_causes(parts, hit) or causes
            causes = evidence.with_switches(causes, parts)

        yield Diagnosis(
            symptom=symptom,
            hit=hit,
            causes=causes,
            values=evidence.quoted_values(causes, hit),
            is_proved=bool(causes) and evidence.proves(causes[0]),
        )


def _with_pin(
    symptom: Symptom,
    hit: Hit,
    evidence: _Evidence,
) -> Symptom:
    """Return a symptom judged by what the release of vLLM requires of the package at fault.

    The cause by version replaces all causes, or only the last one if the package is as required.
    """
    before = evidence.lines_before(hit)
    cause = pinned_cause(hit.text, before, evidence.facts)
    if cause is None or (cause.id == NO_RELEASE and not symptom.general):
        return symptom

    # The last cause blames the package's version: if that is as required, the others remain.
    others = symptom.cause[:-1] if cause.id == FITS else ()
    return replace(symptom, cause=(*others, cause))


def _weights_by_line(symptom: Symptom, log: Scan) -> _Weights:
    by_line: dict[int, int] = {}
    lighter = _GENERAL_WEIGHT * symptom.general
    for text in symptom.says:
        weight = text_pattern(text).weight - lighter

        for hit in log.hits_of([text]):
            by_line[hit.number] = max(weight, by_line.get(hit.number, weight))

    return by_line


def _hides(
    rival: Symptom,
    symptom: Symptom,
    weights: Mapping[str, _Weights],
) -> bool:
    """Return whether a rival symptom has a more specific text in each line of a symptom.

    A rival with a milder level never hides a symptom. With the same level, neither does one that
    only follows from another error, unless the symptom does so too or is general.
    """
    rival_rank = (_LEVELS.index(rival.level), rival.follows)
    gives_way = max(symptom.follows, symptom.general)
    if rival_rank > (_LEVELS.index(symptom.level), gives_way):
        return False

    rival_weights = weights[rival.id]
    return all(
        rival_weights.get(line, -sys.maxsize) > weight
        for line, weight in weights[symptom.id].items()
    )
