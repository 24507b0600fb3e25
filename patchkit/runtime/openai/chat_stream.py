"""Ask a question of an OpenAI server and take the answer as it streams, in any release's shape."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from patchkit.runtime.openai.http_exchange import HttpServer

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

# vLLM up to 0.11.0 sends reasoning_content, 0.11.1 to 0.14 both with one text, from 0.16 reasoning.
_REASONING = ("reasoning", "reasoning_content")
_KNOWN = ("content", *_REASONING, "text", "tool_calls")
_LONGEST = 1 << 17  # characters of a text that are kept
_LINE = 1 << 20  # bytes of an event
_NOT_HERE = (400, 404, 405, 501)  # answers of a server that has no such question


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
    fields: tuple[str, ...] = ()
    finish: str = ""
    first_ms: float | None = None
    ms: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    said: str = ""
    trouble: str = ""


def ask_anyhow(
    server: HttpServer, model: str, question: str, tokens: int, seconds: float
) -> StreamedAnswer:
    """Ask by chat; where that is not served, as for a base model, by plain completion."""
    answer = ask_chat(server, model, question, tokens, seconds)
    if answer.status not in _NOT_HERE:
        return answer
    body = {"prompt": question, **_common(model, tokens)}
    other = _streamed(server, COMPLETION, body, seconds)
    return other if other.status == 200 else answer


def ask_chat(
    server: HttpServer, model: str, question: str, tokens: int, seconds: float
) -> StreamedAnswer:
    """Ask a question by chat, at temperature 0."""
    message = {"role": "user", "content": question}
    return _streamed(server, CHAT, {"messages": [message], **_common(model, tokens)}, seconds)


def _common(model: str, tokens: int) -> dict[str, Any]:
    usage = {"include_usage": True}
    return {
        "model": model,
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": usage,
    }


@dataclass(slots=True)
class _Taken:
    """What has come so far of a stream."""

    began: float
    texts: dict[str, list[str]] = field(default_factory=dict)
    size: int = 0
    first_ms: float | None = None
    finish: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    said: str = ""

    def take(self, event: object) -> None:
        """Take a chunk as far as it has the shape of one."""
        if not isinstance(event, dict):
            return
        if isinstance(usage := event.get("usage"), dict):
            self.usage = usage
        if "error" in event:
            self.said = said_by(event)
        choices = event.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return
        if isinstance(finish := choice.get("finish_reason"), str):
            self.finish = finish[:40]
        delta = choice.get("delta")
        self._take_texts(delta if isinstance(delta, dict) else choice)

    def _take_texts(self, delta: Mapping[str, Any]) -> None:
        for name in _KNOWN:
            value = delta.get(name)
            text = json.dumps(value) if name == "tool_calls" and value else value
            if isinstance(text, str) and text and self.size < _LONGEST:
                self.first_ms = self.first_ms or (time.monotonic() - self.began) * 1000
                self.texts.setdefault(name, []).append(text)
                self.size += len(text)

    def text(self, *names: str) -> str:
        """Return the text of the first of these fields that had any: both may carry the same."""
        return next(("".join(self.texts[each]) for each in names if each in self.texts), "")

    def count(self, name: str) -> int | None:
        value = self.usage.get(name)
        return value if type(value) is int and 0 <= value < 1 << 40 else None


def _streamed(
    server: HttpServer, path: str, body: dict[str, Any], seconds: float
) -> StreamedAnswer:
    taken = _Taken(began=time.monotonic())
    status, trouble, rest = 0, "", b""
    with contextlib.closing(server.stream(path, body, seconds)) as parts:
        for each in parts:
            if isinstance(each, int):
                status = each
            elif isinstance(each, str):
                trouble = each
            else:
                rest += each
                # What is no stream, such as an error, is one piece of JSON.
                rest = _take_lines(taken, rest) if status == 200 else rest
                if len(rest) > _LINE:
                    trouble = "an event without an end"
                    break
    if status == 200:
        _take_lines(taken, rest + b"\n")
        if not trouble and not taken.finish and taken.texts:
            trouble = "the stream ended in the middle"
    else:
        with contextlib.suppress(ValueError, RecursionError):
            taken.said = said_by(json.loads(rest))
    return StreamedAnswer(
        path=path,
        status=status,
        content=server.clean(taken.text("content", "text"), _LONGEST),
        reasoning=server.clean(taken.text(*_REASONING), _LONGEST),
        fields=tuple(sorted(taken.texts)),
        finish=server.clean(taken.finish),
        first_ms=taken.first_ms,
        ms=(time.monotonic() - taken.began) * 1000,
        prompt_tokens=taken.count("prompt_tokens"),
        completion_tokens=taken.count("completion_tokens"),
        said=server.clean(taken.said),
        trouble=trouble,
    )


def _take_lines(taken: _Taken, data: bytes) -> bytes:
    """Take the whole lines of a stream of events; return what is left of the last one."""
    *lines, rest = data.split(b"\n")
    for event in _events(lines):
        taken.take(event)
    return rest


def _events(lines: list[bytes]) -> Iterator[object]:
    for line in lines:
        data = line.strip().removeprefix(b"data:")
        if data != line.strip() and data.strip() != b"[DONE]":
            with contextlib.suppress(ValueError, RecursionError):
                yield json.loads(data)


def said_by(answer: object) -> str:
    """Return what an answer says is wrong: vLLM up to 0.10 has the text at the top, FastAPI too."""
    if not isinstance(answer, dict):
        return ""
    inner = answer.get("error")
    place = inner if isinstance(inner, dict) else answer
    found = place.get("message") or place.get("detail") or inner
    return found if isinstance(found, str) else ""
