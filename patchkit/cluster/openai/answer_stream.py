"""Ask a question of an OpenAI server and take its answer apart as it streams, of any release."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from patchkit.cluster.openai.http_exchange import ExchangeLimits, HttpServer
from patchkit.units import BYTES_PER_MIB

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

# vLLM up to 0.11.0 sends reasoning_content, 0.11.1 to 0.15 both with one text, from 0.16 reasoning.
# `text` is a completion's; `refusal` stands in the place of content where a model declines.
_NAMES: Mapping[Literal["reasoning", "content"], tuple[str, ...]] = {
    "reasoning": ("reasoning", "reasoning_content"),
    "content": ("content", "text", "refusal"),
}
_CALLS = 64  # calls of tools in an answer
_SHORT = 500  # characters of what a server says of itself
_OTHER_LINES = (b":", b"event:", b"id:", b"retry:")  # of a stream of events, without data
_NOT_HERE = (400, 404, 405, 501)  # answers of a server that has no such question


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool that a model asks for; ``arguments`` is what it wrote: JSON, if it can."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedAnswer:
    """What came back for one question; ``status`` is 0 where nothing did.

    ``fields`` are the names under which text came, ``first_ms`` when the first of it did, None for
    none; ``finish`` is the server's reason to end, "" for none. ``said`` is what it says instead
    of an answer, ``trouble`` what went wrong on the way; the counts of tokens are the server's.
    """

    path: str
    status: int = 0
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    fields: tuple[str, ...] = ()
    finish: str = ""
    first_ms: float | None = None
    ms: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    said: str = ""
    trouble: str = ""

    @property
    def rate(self) -> float | None:
        """Return the tokens a second after the first one, None where too few came to say."""
        tokens, seconds = self.completion_tokens or 0, (self.ms - (self.first_ms or 0.0)) / 1000
        return (tokens - 1) / seconds if tokens > 4 and seconds > 0.05 else None


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """A piece of an answer's text, as it comes."""

    kind: Literal["reasoning", "content"]
    text: str


def ask_anyhow(
    server: HttpServer, model: str, question: str, tokens: int, seconds: float
) -> StreamedAnswer:
    """Ask by chat; where that is not served, as for a base model, by plain completion."""
    answer = ask_chat(server, model, question, tokens, seconds)
    if answer.status not in _NOT_HERE:
        return answer
    body = {"prompt": question, "model": model, "temperature": 0, "max_tokens": tokens}
    other = AnswerStream(server, COMPLETION, body, ExchangeLimits(seconds=seconds)).whole()
    return other if other.status == 200 else answer


def ask_chat(
    server: HttpServer, model: str, question: str, tokens: int, seconds: float
) -> StreamedAnswer:
    """Ask a question by chat, at temperature 0."""
    messages = [{"role": "user", "content": question}]
    body = {"messages": messages, "model": model, "temperature": 0, "max_tokens": tokens}
    return AnswerStream(server, CHAT, body, ExchangeLimits(seconds=seconds)).whole()


class AnswerStream:
    """A question and its answer; ``pieces`` asks it, once, and ``answer`` is what has come.

    Whoever leaves ``pieces`` early closes it: that ends the connection, and with it the server's
    work.
    """

    def __init__(
        self, server: HttpServer, path: str, body: dict[str, Any], limits: ExchangeLimits
    ) -> None:
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        self.server, self.path, self.limits, self.body = server, path, limits, body | streamed
        self.status, self.trouble = 0, ""
        self._began = time.monotonic()
        self._ended = self._first_ms = 0.0
        self._size = self._events = 0
        self._texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._fields: set[str] = set()
        self._calls: dict[int, dict[str, str]] = {}
        self._usage: Mapping[str, Any] = {}
        self._finish = self._said = ""
        self._rest = b""

    def whole(self) -> StreamedAnswer:
        """Ask, and return the answer when it is whole, or when no more of it comes."""
        for _ in self.pieces():
            pass
        return self.answer()

    def answer(self) -> StreamedAnswer:
        """Return what has come; the texts are without the server's key."""
        clean, longest = self.server.clean, self.limits.characters
        ended = self._ended or time.monotonic()
        details = self._usage.get("completion_tokens_details")
        return StreamedAnswer(
            path=self.path,
            status=self.status,
            content=clean("".join(self._texts["content"]), longest),
            reasoning=clean("".join(self._texts["reasoning"]), longest),
            tool_calls=tuple(
                ToolCall(**{name: clean(text, longest) for name, text in call.items()})
                for call in self._calls.values()
            ),
            fields=tuple(sorted(self._fields)),
            finish=clean(self._finish, _SHORT),
            first_ms=self._first_ms or None,
            ms=(ended - self._began) * 1000,
            prompt_tokens=_token_count(self._usage, "prompt_tokens"),
            completion_tokens=_token_count(self._usage, "completion_tokens"),
            reasoning_tokens=_token_count(details, "reasoning_tokens"),
            said=clean(self._said, _SHORT),
            trouble=self.trouble,
        )

    def pieces(self) -> Generator[StreamPiece, None, None]:
        """Ask, and yield the text as it comes."""
        self._began = time.monotonic()
        exchange = self.server.stream(self.path, self.body, self.limits)
        with contextlib.closing(exchange):
            for part in exchange:
                if isinstance(part, int):
                    self.status = part
                elif isinstance(part, str):
                    self.trouble = part
                else:
                    yield from self._take(part)
                if len(self._rest) > BYTES_PER_MIB:
                    self.trouble = "an event without an end"
                    break
                if self._size > self.limits.characters:
                    self.trouble = f"more than {self.limits.characters} characters"
                    break
            yield from self._end()

    def _take(self, data: bytes) -> Iterator[StreamPiece]:
        """Take the whole lines of a stream of events; what is no stream is kept to its end."""
        if self.status != 200:
            self._rest += data
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for number, line in enumerate(lines):
            text = line.strip()
            if text.startswith(b"data:"):
                self._events += 1
                with contextlib.suppress(ValueError, RecursionError):
                    yield from self._take_event(json.loads(text.removeprefix(b"data:")))
            elif text and not self._events and not text.startswith(_OTHER_LINES):
                # One piece of JSON, or a page: a server that does not stream.
                self._rest = b"\n".join((*lines[number:], self._rest))
                return

    def _end(self) -> Iterator[StreamPiece]:
        """Take what came behind the last whole line, and say if that was no end."""
        self._ended = time.monotonic()
        if self.status == 200:
            yield from self._take(b"\n")
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(self._rest) if not self._events else None
            if self.status == 200:
                yield from self._take_event(found)
            else:
                self._said = _find_message(found)
        if self.status == 200 and not self.trouble and not self._finish:
            if any(self._fields):
                self.trouble = "the stream ended in the middle"
            elif not self._events and not self._said:
                self.trouble = "what came is no answer of the OpenAI API"

    def _take_event(self, event: object) -> Iterator[StreamPiece]:
        """Take a chunk as far as it has the shape of one."""
        if not isinstance(event, dict):
            return
        if isinstance(usage := event.get("usage"), dict):
            self._usage = usage
        if event.get("error"):
            self._said = _find_message(event)
        choices = event.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict) or choice.get("index") not in (0, None):
            return  # the first of several answers alone
        if isinstance(finish := choice.get("finish_reason"), str):
            self._finish = finish[:40]
        parts = (choice.get("delta"), choice.get("message"), choice)
        delta: dict[str, Any] = next(part for part in parts if isinstance(part, dict))
        for kind, names in _NAMES.items():
            found = [name for name in names if isinstance(delta.get(name), str) and delta[name]]
            if found:
                text = delta[found[0]]
                self._count_text(*found, size=len(text))
                self._texts[kind].append(text)
                yield StreamPiece(kind, self.server.clean(text, self.limits.characters))
        calls = delta.get("tool_calls")
        for part in calls if isinstance(calls, list) else ():
            if isinstance(part, dict) and len(self._calls) < _CALLS:
                self._take_call(part)

    def _take_call(self, part: dict[str, Any]) -> None:
        """Take a part of a call: a name comes once, arguments piece by piece."""
        index, function = part.get("index"), part.get("function")
        call = self._calls.setdefault(index if type(index) is int else len(self._calls), {})
        texts = {"id": part.get("id"), **(function if isinstance(function, dict) else {})}
        for name in ("id", "name", "arguments"):
            if isinstance(text := texts.get(name), str) and text:
                self._count_text("tool_calls", size=len(text))
                call[name] = call.get(name, "") + text if name == "arguments" else text

    def _count_text(self, *names: str, size: int) -> None:
        self._fields.update(names)
        self._first_ms = self._first_ms or (time.monotonic() - self._began) * 1000
        self._size += size


def _token_count(table: object, name: str) -> int | None:
    value = table.get(name) if isinstance(table, dict) else None
    return value if type(value) is int and 0 <= value < 1 << 40 else None


def _find_message(answer: object) -> str:
    """Return what an answer says is wrong: vLLM up to 0.10 has the text at the top, FastAPI too."""
    if not isinstance(answer, dict):
        return ""
    inner = answer.get("error")
    place = inner if isinstance(inner, dict) else answer
    found = place.get("message") or place.get("detail") or inner
    return found if isinstance(found, str) else ""
