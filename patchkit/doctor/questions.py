"""Judge whether a model talks sense: its answers to questions that have a known one. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from patchkit.cluster.agent.server_answers import AskedFact
from patchkit.doctor.peers.check import make_finding
from patchkit.finding import Finding
from patchkit.paths import RECIPES
from patchkit.records import read_toml

_SHOWN = 60  # characters of an answer
_GOOD, _FAIR = 0.8, 0.5  # shares of right answers: those of a small model, and those of none
_THOUGHT = re.compile(r"^.*?</think(?:ing)?>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question of recipes/doctor/questions.toml, and the answers that are right."""

    id: str
    ask: str
    accepts: tuple[str, ...]

    def accepts_text(self, text: str) -> bool:
        """Return whether a text has one of the answers that are right."""
        plain = unicodedata.normalize("NFKC", text).casefold()
        plain = re.sub(r"[*_`$\\]", "", plain)
        return any(
            re.search(rf"(?<![a-z0-9]){re.escape(right)}(?![a-z0-9])", plain)
            if right.isascii()
            else right in plain
            for right in self.accepts
        )


@cache
def questions() -> tuple[Question, ...]:
    return read_toml(tuple[Question, ...], RECIPES / "doctor" / "questions.toml", key="question")


def questions_to_ask() -> list[dict[str, str]]:
    """Return the argument ``questions`` of ``server_answers.ask_facts``."""
    return [{"id": question.id, "ask": question.ask} for question in questions()]


def question_findings(node: str, model: str, answers: Sequence[AskedFact]) -> Iterator[Finding]:
    """Yield what the answers of ``ask_facts`` say of a model; the first one is asked twice."""
    asked = sum(not fact.again for fact in answers)
    lacking = [fact.answer for fact in answers if not fact.again and not _is_whole(fact)]
    whole = [fact for fact in answers if _is_whole(fact)]
    got = [fact for fact in whole if not fact.again]
    if lacking:
        trouble = lacking[0].trouble or lacking[0].said or "no answer"
        fields = {"count": len(lacking), "asked": asked, "trouble": trouble}
        yield make_finding("sense-not-asked", node, **fields)
    yield from _judge_empty(node, got)
    yield from _judge_right(node, model, got)
    for again in (fact for fact in whole if fact.again):
        texts = [_answer_text(fact) for fact in whole if fact.id == again.id]
        if len({*texts}) > 1:
            one, other = (repr(text[:_SHOWN]) for text in texts[:2])
            yield make_finding("sense-repeat", node, id=again.id, one=one, other=other)


def _is_whole(fact: AskedFact) -> bool:
    return fact.answer.status == 200 and not fact.answer.trouble and not fact.answer.said


def _answer_text(fact: AskedFact) -> str:
    """Return what a user would call the answer: without thoughts that no parser took out."""
    text = _THOUGHT.sub("", fact.answer.content)
    return "" if text.lstrip().startswith("<think") else text.strip()


def _judge_empty(node: str, got: Sequence[AskedFact]) -> Iterator[Finding]:
    """Yield why answers are empty: max_tokens, or something else."""
    empty = [fact.answer for fact in got if not _answer_text(fact)]
    long = [answer for answer in empty if answer.finish == "length"]
    others = [answer for answer in empty if answer.finish != "length"]
    if long:
        tokens = max(answer.completion_tokens or 0 for answer in long) or "all"
        yield make_finding("sense-null", node, count=len(long), asked=len(got), tokens=tokens)
    if others:
        finish = others[0].finish or "none"
        yield make_finding("sense-empty", node, count=len(others), asked=len(got), finish=finish)


def _judge_right(node: str, model: str, got: Sequence[AskedFact]) -> Iterator[Finding]:
    """Yield how many answers are right, of those that say anything."""
    by_id = {question.id: question for question in questions()}
    said = [(by_id[fact.id], text) for fact in got if (text := _answer_text(fact))]
    wrong = [(question, text) for question, text in said if not question.accepts_text(text)]
    right = len(said) - len(wrong)
    if not said:
        return
    about = "sense"
    if right < _GOOD * len(said):
        about = "sense-some-wrong" if right > _FAIR * len(said) else "sense-wrong"
    shown = "; ".join(f"{question.ask} {text[:_SHOWN]!r}" for question, text in wrong[:2])
    yield make_finding(about, node, model=model, right=right, asked=len(said), wrong=shown)
