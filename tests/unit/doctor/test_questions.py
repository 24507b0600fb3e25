"""Ask a server facts, and judge whether its model talks sense."""

import time
from dataclasses import replace

import pytest

from patchkit.cluster.agent.server_answers import AskedFact, ask_facts
from patchkit.cluster.ssh.node import Remote
from patchkit.doctor.questions import (
    question_findings,
    questions,
    questions_to_ask,
)
from patchkit.finding import Level
from support.model_server import ModelServer

RIGHT = {each.ask: each.accepts[0].title() for each in questions()}


def asked(server, **given):
    given = {"key_file": "/nonexistent", "model": "small"} | given
    given |= {"url": server.url, "questions": questions_to_ask()}
    return list(Remote("localhost").stream(AskedFact, ask_facts, **given))


def judged(answers):
    return {each.about: each for each in question_findings("spark-1", "small", answers)}


@pytest.mark.parametrize("release", ["0.10", "0.12", "0.33"])
@pytest.mark.parametrize("reasoning", ["", "What may it be? I know."])
def test_a_model_that_knows(release, reasoning):
    with ModelServer(release, answers=RIGHT, reasoning=reasoning) as server:
        found = asked(server)
    assert len(found) == 11
    assert [each.id for each in found[:2]] == ["france"] * 2
    assert {body["temperature"] for body in server.asked} == {0}
    (only,) = judged(found).values()
    assert (only.about, only.level) == ("sense", Level.OK)
    assert only.what == "small answers 10 of 10 easy questions right"


def test_questions_do_not_hold_their_answers():
    assert len({each.id for each in questions()}) == 10
    for each in questions():
        assert not each.accepts_text(each.ask), each.ask
        assert all(each.accepts_text(f"The answer is **{one}**.") for one in each.accepts)
        assert not each.accepts_text("I do not know, 1234 or so.")


SAMPLES = {  # what the server answers → what is found first, at which level, words of it
    "garbage": ({"answer": "!" * 60}, "sense-wrong", Level.ERROR, "!!!!!"),
    "wrong": ({"answer": "London"}, "sense-wrong", Level.ERROR, "only 0 of 10"),
    "some": (
        {"answers": dict(list(RIGHT.items())[:6]), "answer": "perhaps"},
        "sense-some-wrong",
        Level.WARNING,
        "6 of 10",
    ),
    "null": (
        {"answer": "", "reasoning": "Let me see what it is.", "finish": "length"},
        "sense-null",
        Level.WARNING,
        "10 of 10 answers are empty (content null): 5 tokens",
    ),
    "no parser": (
        {"answer": "<think>\nLet me see", "finish": "length"},
        "sense-null",
        Level.WARNING,
        "empty",
    ),
    "empty": ({"answer": ""}, "sense-empty", Level.WARNING, "finish_reason stop"),
    "refused": (
        {"refuse": (400, {"error": {"message": "no chat template"}})},
        "sense-not-asked",
        Level.UNKNOWN,
        "10 of 10 questions have no answer: no chat template",
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_said_of_answers(name):
    faults, about, level, words = SAMPLES[name]
    with ModelServer(**faults) as server:
        found = judged(asked(server))
    assert next(iter(found)) == about
    assert (found[about].level, words in found[about].what) == (level, True)
    assert "sense" not in found


def test_two_answers_to_one_question():
    with ModelServer(answers=RIGHT) as server:
        first, again, *others = asked(server)
    changed = replace(again, answer=replace(again.answer, content="Paris, of course"))
    found = judged([first, changed, *others])
    assert list(found) == ["sense", "sense-repeat"]
    assert found["sense-repeat"].level is Level.WARNING


def test_the_time_ends_for_all_questions():
    with ModelServer(silent=True) as server:
        began = time.monotonic()
        found = asked(server, seconds=2.0)
    assert time.monotonic() - began < 10
    assert len(found) == 11
    (only,) = judged(found).values()
    assert (only.about, only.level) == ("sense-not-asked", Level.UNKNOWN)
