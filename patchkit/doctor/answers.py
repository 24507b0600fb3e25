"""Judge the answers of a model: is it the model that it should be? Pure."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from operator import eq, sub

from patchkit.cluster.agent.fingerprint import Fingerprint, Start
from patchkit.cluster.agent.group_script import NOT_HERE
from patchkit.cluster.openai.server_answers import ModelAnswers, Reply
from patchkit.finding import Finding, Level, finding_from_text
from patchkit.frozen import Texts, Values, frozen
from patchkit.quoting import quoted
from patchkit.records import RECIPES, read_toml

TEXTS = "answers.toml"
_SHOWN = 60  # characters of a text of the model
_NEVER = 20.0  # nats a token: another tokenizer
_HIGH = 1e6  # a perplexity that no vocabulary has
_CERTAIN = 1e-6  # the least chance of another token
_MADE_HERE = "/patchkit/venvs/"  # environments of `patchkit cluster install`
_FAILED = 500  # statuses of HTTP from here on are the server's fault
_CHATS = ("chat", "tool")
_SUMMED = (Level.ERROR, Level.OK)
_Judged = Iterator[tuple[str, Mapping[str, object]]]


@frozen
class Bounds:
    """Where unusual answers begin, and where wrong ones; ``bounds.toml`` explains the fields.

    ``marks`` are patterns of what a parser of the server splits off, by the parser's flag,
    ``back_ends`` patterns of the lines in which vLLM's log names one. ``calls`` are the parsers of
    calls by the mark that they read.
    """

    facts: int
    apart: Mapping[str, Mapping[str, float]]
    formats: str
    perplexity: Mapping[str, float]
    marks: Values
    back_ends: Texts
    no_numbers: str
    call_parser: str
    calls: Mapping[str, Texts]


_BOUNDS = read_toml(Bounds, RECIPES / "answers" / "bounds.toml")


@frozen
class AnswerCase:
    """Answers to judge; ``former`` is the fingerprint to compare them with, None for none.

    ``again`` is the command that asks again, ``log`` are the lines of the server.
    """

    answers: ModelAnswers
    former: Fingerprint | None
    again: str
    log: Iterable[str]

    def replies(self, about: str) -> list[Reply]:
        """Return the replies to questions of a kind."""
        return [
            reply
            for reply in self.answers.replies
            if (reply.about, reply.refusal) == (about, "")
        ]

    def reply(self, about: str) -> Reply:
        """Return the reply to a question, an empty one for none."""
        return next(iter(self.replies(about)), Reply(about=about, id=about))

    def wrong(self, about: str) -> list[Reply]:
        """Return the wrong replies to questions of a kind."""
        return [reply for reply in self.replies(about) if not reply.is_right]

    @property
    def is_complete(self) -> bool:
        """Return whether each passage has chances."""
        refusals = {r.refusal for r in self.answers.replies if r.about == "passage"}
        return refusals == {""}

    @property
    def chances(self) -> dict[str, tuple[float, ...]]:
        """Return the logarithms of the chances of each passage's tokens."""
        return {reply.id: reply.logprobs for reply in self.replies("passage")}

    def words(self) -> Mapping[str, object]:
        """Return the words that all findings may use."""
        chances = self.chances
        parts = [f"{name} {_figure([values], 1)}" for name, values in chances.items()]
        before = ""
        if self.former:
            before = f"{_figure(self.former.logprobs.values(), 2)} → "

        facts = len(self.replies("fact"))
        known = facts - len(self.wrong("fact"))
        return {
            "perplexity": f"{before}{_figure(chances.values(), 2)}",
            "parts": ", ".join(parts),
            "facts": f"{known} of {facts} facts",
            "back_ends": f"the log names {find_back_ends(self.log)}",
            "back": back_command(self.former, self.answers.start),
            "again": self.again,
            "seconds": self.answers.seconds,
        }


def _perplexity(texts: Iterable[Sequence[float]]) -> float:
    values = [value for text in texts for value in text]
    mean = -sum(values) / max(len(values), 1)
    return math.exp(min(mean, _NEVER))


def _figure(texts: Iterable[Sequence[float]], places: int) -> str:
    figure = _perplexity(texts)
    return f"{figure:.{places}f}" if figure <= _HIGH else "> 1e6"


def find_back_ends(lines: Iterable[str]) -> str:
    """Return in words which back ends a server's log says that it chose."""
    pattern = re.compile("|".join(_BOUNDS.back_ends))
    matches = filter(None, map(pattern.search, lines))
    names = dict.fromkeys(match[0] for match in matches)
    return ", ".join(list(names)[:6]) or "no back end"


def fingerprint(
    case: AnswerCase, findings: Sequence[Finding], now: float
) -> Fingerprint:
    """Return what is kept of the answers.

    The worst of ``findings`` comes first; ``now`` is in seconds since 1970.
    """
    summed = [(each.level, each.what) for each in findings if each.level in _SUMMED]
    worst, summary = next(iter(summed), (Level.UNKNOWN, ""))
    return Fingerprint(
        start=case.answers.start,
        time=now,
        logprobs=case.chances,
        summary=summary,
        is_right=case.is_complete and worst is Level.OK,
    )


def choose_former(answers: ModelAnswers) -> Fingerprint | None:
    """Return the fingerprint to compare with: of the same start, else the newest, else None."""
    same = [former for former in answers.former if former.start == answers.start]
    return next(iter([*same, *answers.former]), None)


def back_command(former: Fingerprint | None, start: Start) -> str:
    """Return the command that brings back what `up` served, or else one that tests kernels."""
    if former is None or not former.start.cluster or former.start == start:
        return "patchkit doctor --gpu"

    up = quoted("patchkit", "up", start.model)
    release = former.start.part("vLLM").partition("+")[0]
    if release == start.part("vLLM").partition("+")[0]:
        return up

    # As docs/upgrade.md names the folders.
    house = f"wheelhouse-{release}"
    install = quoted("patchkit", "cluster", "install", "--wheelhouse", house)
    venv = former.start.part("installation")
    if _MADE_HERE not in venv:
        install = f"{quoted(f'{venv}/bin/pip', 'install', house)}/vllm-*.whl"
    return f"{install} && {up}"


def answer_findings(where: str, case: AnswerCase) -> list[Finding]:
    """Return the findings about a model's answers, the worst ones first."""
    common = case.words()
    findings = [
        finding_from_text(TEXTS, f"answers-{about}", where, **{**common, **fields})
        for about, fields in _judge(case)
    ]
    return sorted(findings, key=lambda finding: list(Level).index(finding.level))


def _judge(case: AnswerCase) -> _Judged:
    yield from _judge_passages(case)
    yield from _judge_distances(case)
    yield from _judge_words(case)
    yield from _judge_parser(case)
    yield from _judge_refusals(case)


def _judge_passages(case: AnswerCase) -> _Judged:
    """Judge perplexities and facts together: high ones are no fault of a model that knows facts."""
    figures = {name: _perplexity([values]) for name, values in case.chances.items()}
    high = [
        name for name in figures if figures[name] > _BOUNDS.perplexity.get(name, 0.0)
    ]
    wrong = case.wrong("fact")
    knows_little = len(wrong) > _BOUNDS.facts

    if figures:
        guesses = len(high) == len(figures)
        knows_no_fact = guesses and len(wrong) == len(case.replies("fact"))
        about = "doubtful" if knows_no_fact else "right"
        yield "garbage" if guesses and knows_little else about, {}
    if knows_little:
        yield "fact", {"wrong": _quote(wrong)}
    for name in high:
        yield "language", {"language": name, "figure": _figure([case.chances[name]], 0)}


def _quote(replies: Iterable[Reply]) -> str:
    texts = [
        f"{reply.id}: {' '.join(reply.text.split())[:_SHOWN]!r}" for reply in replies
    ]
    return ", ".join(texts[:3])


def _judge_distances(case: AnswerCase) -> _Judged:
    """Judge how far answers are apart: each distance by the first bound that it exceeds."""
    former = case.former
    changes = _changes(case.answers.start, former.start) if former else ""
    for name, gap in distances(case).items():
        for about, bound in _BOUNDS.apart[name].items():
            if gap > bound:
                yield about, {"gap": gap, "bound": bound, "changes": changes}
                break


def distances(case: AnswerCase) -> dict[str, float]:
    """Return how far answers are apart that should be equal, in nats a token, by table of bounds.

    First the pairs of this start of which both replies came; then the passage that moved farthest
    since the former start.
    """
    warm = case.reply("warm")
    steps = case.reply("steps").logprobs[-len(warm.tokens) :]
    cache, flip = _answer_gaps(case.reply("cold"), warm)
    gaps = {
        "twice": _gap(case.reply("passage").logprobs, case.reply("again").logprobs),
        "cache": cache,
        "flip": flip,
        "steps": _gap(warm.logprobs, steps),
    }
    gaps = {name: gap for name, gap in gaps.items() if gap < _NEVER}

    former = case.former
    if former:
        # A passage that one of both starts refused says nothing.
        chances = case.chances
        shared = chances.keys() & former.logprobs.keys()
        moves = [_gap(former.logprobs[name], chances[name]) for name in shared]
        has_same_formats = _formats(case.answers.start) == _formats(former.start)
        gaps["moved" if has_same_formats else "formats"] = max(moves, default=0.0)
    return gaps


def _formats(start: Start) -> set[str]:
    """Return the flags that choose a format of weights, inputs or cache."""
    return set(re.findall(_BOUNDS.formats, start.part("flags")))


def _gap(first: Sequence[float], second: Sequence[float]) -> float:
    """Return how far the chances of the same tokens are apart, in nats a token, on average.

    Another number of tokens is another tokenizer, whose chances cannot be compared.
    """
    if len(first) != len(second):
        return _NEVER
    gaps = map(abs, map(sub, first, second))
    return float(sum(gaps)) / max(len(first), 1)


def _changes(start: Start, former: Start) -> str:
    """Return in words what differs between two starts of a model."""
    changes = []
    for name, text in start.parts.items():
        now = Counter(text.split())
        before = Counter(former.part(name).split())
        gone = " ".join(before - now)
        new = " ".join(now - before)
        changes.append(f"{name} [{gone}] → [{new}]" * (now != before))
    return "; ".join(filter(None, changes)) or "nothing that is known"


def _answer_gaps(first: Reply, second: Reply) -> tuple[float, float]:
    """Return how far two answers are apart, in nats a token, up to their first other token.

    And how certain the first answer was of its own there: by how many nats more than of all others.
    """
    if len(first.tokens) != len(second.tokens):
        return _NEVER, _NEVER
    agreements = map(eq, first.tokens, second.tokens)
    same = len(list(takewhile(bool, agreements)))
    flip = 0.0
    for logprob in first.logprobs[same : same + 1]:
        chance = math.exp(min(logprob, 0.0))
        flip = logprob - math.log(max(1 - chance, _CERTAIN))
    return _gap(first.logprobs[:same], second.logprobs[:same]), flip


def _judge_words(case: AnswerCase) -> _Judged:
    """Judge the answers that need a chat template, parsers, or a long text."""
    for reply in map(case.reply, _CHATS):
        fields = {"text": _quote([reply])}
        for parser, marks in _BOUNDS.marks.items():
            if re.search(marks, reply.text):
                yield "marks", {**fields, "parser": parser}
                break
        else:
            is_unfinished = reply.is_cut and reply.thinks
            if not (reply.is_right or is_unfinished):
                yield reply.about, fields

    if lost := case.wrong("needle"):
        yield "needle", {"counts": f"{len(lost)} of 2", "text": _quote(lost)}


def _judge_parser(case: AnswerCase) -> _Judged:
    """Judge whether the server reads the calls that the model's own template writes.

    Needs no call: a model may make none for the question.
    """
    by_mark = _BOUNDS.calls
    readers = {reader for names in by_mark.values() for reader in names}
    flags = case.answers.start.part("flags")
    parsers = readers.intersection(re.findall(_BOUNDS.call_parser, flags))

    # The first mark encloses the others, or is the more exact one.
    marks = [mark for mark in by_mark if mark in case.answers.template]
    for mark in marks[:1]:
        for parser in parsers.difference(by_mark[mark]):
            names = ", ".join(by_mark[mark])
            yield "parser", {"mark": mark, "parser": parser, "readers": names}


def _judge_refusals(case: AnswerCase) -> _Judged:
    """Yield the questions without a reply; a server without a parser for tools refuses those."""
    kinds: dict[tuple[str, str], dict[str, None]] = {}
    for reply in case.answers.replies:
        if reply.refusal and (reply.about, reply.status) != ("tool", 400):
            about = _kind_of_refusal(reply)
            kinds.setdefault((about, reply.refusal), {})[reply.about] = None

    for (about, refusal), names in kinds.items():
        yield about, {"kind": ", ".join(names), "refusal": refusal}


def _kind_of_refusal(reply: Reply) -> str:
    if _BOUNDS.no_numbers in reply.refusal:
        return "failed"
    if reply.status in NOT_HERE:
        return "unserved"
    if reply.status < _FAILED:
        return "unasked"
    return "template" if reply.about in _CHATS else "failed"
