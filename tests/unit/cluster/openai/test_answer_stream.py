"""Take apart what servers of several releases really sent, in whatever pieces it comes."""

import json
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkit.cluster.openai.answer_stream import AnswerStream, ToolCall
from patchkit.cluster.openai.http_exchange import ExchangeLimits, HttpServer
from support.model_server import STREAMS, ModelServer, recorded

THOUGHT, ANSWER = (
    "Six times seven: six rows of sevens, naïvely added",
    "\n\nIt is **42**, or 四十二.",
)
FIELDS = {
    "0.11.0": ("reasoning_content",),
    "0.12.0": ("reasoning", "reasoning_content"),
    "0.32.0": ("reasoning",),
}


def taken(data, cuts=()):
    """Return the pieces and the answer of a body that comes cut at these places."""
    sent = [200, *(data[begin:end] for begin, end in pairwise([0, *sorted(cuts), len(data)]))]
    return answered(sent, ExchangeLimits(seconds=1))


@dataclass(frozen=True)
class Recording(HttpServer):
    """What a server sent."""

    sent: tuple = ()

    def stream(self, path, body, limits):
        yield from self.sent


def answered(sent, limits):
    server = Recording("http://h", sent=tuple(sent))
    stream = AnswerStream(server, "/", {}, limits)
    return list(stream.pieces()), stream.answer()


def text_of(pieces, kind):
    return "".join(each.text for each in pieces if each.kind == kind)


@pytest.mark.parametrize("release", FIELDS)
def test_reasoning_of_each_release(release):
    pieces, answer = taken(recorded(f"{release}-thinks"))
    assert (text_of(pieces, "reasoning"), text_of(pieces, "content")) == (THOUGHT, ANSWER)
    assert (answer.reasoning, answer.content) == (THOUGHT, ANSWER)
    assert answer.fields == ("content", *FIELDS[release])
    assert (answer.finish, answer.prompt_tokens, answer.completion_tokens) == ("stop", 7, 20)
    assert answer.reasoning_tokens == (10 if release == "0.32.0" else None)
    assert (answer.trouble, answer.said, answer.tool_calls) == ("", "", ())
    # As they come: no two tokens of an answer have to wait for each other.
    assert len(pieces) > 10


@pytest.mark.parametrize("release", FIELDS)
def test_null_content_of_each_release(release):
    pieces, answer = taken(recorded(f"{release}-short"))
    assert (answer.content, answer.finish, answer.completion_tokens) == ("", "length", 4)
    assert answer.reasoning == text_of(pieces, "reasoning")
    assert THOUGHT.startswith(answer.reasoning)
    assert answer.fields == FIELDS[release]


@pytest.mark.parametrize("release", FIELDS)
def test_calls_of_each_release(release):
    pieces, answer = taken(recorded(f"{release}-calls"))
    (call,) = answer.tool_calls
    # The brace too many is 0.11.0's: what is shown is what it sent.
    more = "}" * (release == "0.11.0")
    assert (call.name, call.arguments) == ("weather", '{"city": "Paris", "days": 2}' + more)
    assert call.id.startswith("chatcmpl-tool-")
    assert (pieces, answer.content, answer.finish) == ([], "", "tool_calls")


def test_an_engine_that_ends_has_status_200_and_says_so():
    pieces, answer = taken(recorded("0.11.0-dies"))
    assert pieces == []
    assert answer.said.startswith("EngineCore encountered an issue.")


@given(st.data())
def test_where_a_body_is_cut_makes_no_difference(data):
    name = data.draw(st.sampled_from(sorted(each.stem for each in STREAMS.glob("*.sse"))))
    body = recorded(name)
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=12))
    pieces, answer = taken(body, cuts)
    whole, expected = taken(body)
    assert pieces == whole
    untimed = {"ms": 0.0, "first_ms": None}
    assert {f: getattr(answer, f) for f in answer.__slots__ if f not in untimed} == {
        f: getattr(expected, f) for f in expected.__slots__ if f not in untimed
    }


@given(st.binary(max_size=200), st.sampled_from([b"", b"data: ", b'data: {"choices": [']))
def test_bytes_that_are_no_answer_are_none(noise, begin):
    pieces, answer = taken(begin + noise)
    assert pieces == []
    assert answer.content == ""
    for each in (answer.said, answer.trouble, answer.finish):
        each.encode()


def event(**delta):
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"


def test_calls_in_the_shapes_of_other_servers():
    """A name that comes again with each part, several calls at once, and none of the right type."""
    first = {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x"'}}
    again = {"index": 0, "id": "a", "function": {"name": "f", "arguments": ": 1}"}}
    other = {"function": {"name": "g", "arguments": "{}"}}
    body = event(tool_calls=[first]) + event(tool_calls=[again, other, 5, {"index": []}])
    _, answer = taken(body + event(tool_calls="none"))
    assert answer.tool_calls[:2] == (
        ToolCall(id="a", name="f", arguments='{"x": 1}'),
        ToolCall(name="g", arguments="{}"),
    )


def test_the_first_of_several_answers_alone():
    other = b'data: {"choices": [{"index": 1, "delta": {"content": "other"}}]}\n\n'
    assert text_of(taken(event(content="a") + other + event(content="b"))[0], "content") == "ab"


def test_what_is_too_long_ends():
    limits = ExchangeLimits(seconds=1, characters=10)
    _, answer = answered([200, *[event(content="xxxx")] * 9], limits)
    assert (answer.content, answer.trouble) == ("x" * 10, "more than 10 characters")
    _, answer = answered([200, *[b"data: " + b"x" * (1 << 19)] * 9], limits)
    assert (answer.content, answer.trouble) == ("", "an event without an end")


WHOLE = {
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ready", "reasoning": "Hm."},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}


@pytest.mark.parametrize(
    ("said", "content", "trouble"),
    [
        (WHOLE, "ready", ""),
        ({"hello": 1}, "", "what came is no answer of the OpenAI API"),
        ([], "", "what came is no answer of the OpenAI API"),
    ],
)
def test_a_server_that_does_not_stream(said, content, trouble):
    with ModelServer(whole=said) as server:
        stream = AnswerStream(HttpServer(server.url), "/v1/chat/completions", {}, LIMITS)
        pieces = list(stream.pieces())
    answer = stream.answer()
    assert (answer.content, answer.trouble, answer.status) == (content, trouble, 200)
    assert [each.kind for each in pieces] == (["reasoning", "content"] if content else [])


LIMITS = ExchangeLimits(seconds=10)


def test_silence_ends_an_answer_and_the_whole_may_take_longer():
    data = recorded("0.32.0-short")
    with ModelServer(recorded=data, slow=0.15) as server:
        limits = ExchangeLimits(seconds=60, silence=0.6)
        answer = AnswerStream(HttpServer(server.url), "/v1/chat/completions", {}, limits).whole()
        assert answer.finish == "length"
        assert answer.ms > 600
        server.faults.slow, server.faults.silent, server.faults.cut_after = 0.0, True, 3
        answer = AnswerStream(HttpServer(server.url), "/v1/chat/completions", {}, limits).whole()
    assert (answer.trouble, answer.reasoning) == ("no answer in 1 s", "Six times")
