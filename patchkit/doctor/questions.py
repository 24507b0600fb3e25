"""Judge whether a model talks sense: its answers to questions that have a known one. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from patchkit.cluster.agent.server_answers import AskedFact
from patchkit.cluster.openai.answer_parts import StreamedAnswer
from patchkit.finding import Finding, finding_from_text
from patchkit.paths import RECIPES
from patchkit.records import read_toml

_FILE = "questions.toml"
_SHOWN = 60  # characters of an answer
_GOOD, _FAIR = 0.8, 0.5  # shares of right answers: those of a small model, and those of none
_THOUGHT = re.compile(r"^.*?</think(?:ing)?>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question of recipes/doctor/questions.toml, and the answers that are right."""

    id: str
    ask: str
    accepts: tuple[str, ...]


@cache
def questions() -> tuple[Question, ...]:
    return read_toml(tuple[Question, ...], RECIPES / "doctor" / _FILE, key="question")


def questions_to_ask() -> list[dict[str, str]]:
    """Return the argument ``questions`` of ``server_answers.ask_facts``."""
    return [{"id": each.id, "ask": each.ask} for each in questions()]


def answer_text(answer: StreamedAnswer) -> str:
    """Return what a user would call the answer: without thoughts that no parser took out."""
    text = _THOUGHT.sub("", answer.content)
    return "" if text.lstrip().startswith("<think") else text.strip()


def is_right(text: str, question: Question) -> bool:
    """Return whether a text has one of the answers that a question accepts."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    plain = re.sub(r"[*_`$\\]", "", plain)
    return any(
        re.search(rf"(?<![a-z0-9]){re.escape(right)}(?![a-z0-9])", plain)
        if right.isascii()
        else right in plain
        for right in question.accepts
    )


def question_findings(node: str, model: str, answers: Sequence[AskedFact]) -> Iterator[Finding]:
    """Yield what the answers of ``ask_facts`` say of a model."""
    first = [each for each in answers if not each.again]
    asked = len(first)
    got = [each for each in first if _is_whole(each.answer)]
    if missing := [each for each in first if each not in got]:
        trouble = missing[0].answer.trouble or missing[0].answer.said or "no answer"
        yield finding_from_text(
            _FILE, "sense-not-asked", node, count=len(missing), asked=asked, trouble=trouble
        )
    yield from _judge_empty(node, got)
    yield from _judge_right(node, model, got)
    yield from _judge_repeat(node, answers)


def _is_whole(answer: StreamedAnswer) -> bool:
    return answer.status == 200 and not answer.trouble and not answer.said


def _judge_empty(node: str, got: Sequence[AskedFact]) -> Iterator[Finding]:
    """Yield why answers are empty: max_tokens, or something else."""
    empty = [each.answer for each in got if not answer_text(each.answer)]
    long = [each for each in empty if each.finish == "length"]
    if long:
        tokens = max(each.completion_tokens or 0 for each in long) or "all"
        fields = {"count": len(long), "asked": len(got), "tokens": tokens}
        yield finding_from_text(_FILE, "sense-null", node, **fields)
    if others := [each for each in empty if each not in long]:
        finish = others[0].finish or "none"
        yield finding_from_text(
            _FILE, "sense-empty", node, count=len(others), asked=len(got), finish=finish
        )


def _judge_right(node: str, model: str, got: Sequence[AskedFact]) -> Iterator[Finding]:
    """Yield how many answers are right, of those that say anything."""
    by_id = {each.id: each for each in questions()}
    said = [(by_id[each.id], text) for each in got if (text := answer_text(each.answer))]
    if not said:
        return
    wrong = [(asked, text) for asked, text in said if not is_right(text, asked)]
    right = len(said) - len(wrong)
    fields = {"model": model, "right": right, "asked": len(said)}
    if right >= _GOOD * len(said):
        yield finding_from_text(_FILE, "sense", node, **fields)
        return
    about = "sense-some-wrong" if right > _FAIR * len(said) else "sense-wrong"
    shown = "; ".join(f"{asked.ask} {text[:_SHOWN]!r}" for asked, text in wrong[:2])
    yield finding_from_text(_FILE, about, node, wrong=shown, **fields)


def _judge_repeat(node: str, answers: Sequence[AskedFact]) -> Iterator[Finding]:
    again = next((each for each in answers if each.again), None)
    first = next((each for each in answers if again and each.id == again.id), None)
    if again is None or first is None or not (_is_whole(again.answer) and _is_whole(first.answer)):
        return
    one, other = answer_text(first.answer), answer_text(again.answer)
    if one != other:
        shown = {"one": repr(one[:_SHOWN]), "other": repr(other[:_SHOWN])}
        yield finding_from_text(_FILE, "sense-repeat", node, id=again.id, **shown)
