"""Take an answer apart as it streams, in the shape of any release: bytes in, text out. Pure."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from patchkit.units import BYTES_PER_MIB

# vLLM up to 0.11.0 sends reasoning_content, 0.11.1 to 0.15 both with one text, from 0.16 reasoning.
# `text` is a completion's; `refusal` stands in the place of content where a model declines.
_NAMES: Mapping[Literal["reasoning", "content"], tuple[str, ...]] = {
    "reasoning": ("reasoning", "reasoning_content"),
    "content": ("content", "text", "refusal"),
}
_LINE = BYTES_PER_MIB  # bytes of an event
_CALLS = 64  # calls of tools in an answer
_SHORT = 500  # characters of what a server says of itself
_OTHER_LINES = (b":", b"event:", b"id:", b"retry:")  # of a stream of events, without data


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


class AnswerParts:
    """What has come of an answer so far; ``take`` gives it the bytes.

    ``longest`` is how many characters of text are taken, ``clean`` what makes a text of the server
    fit to be kept. ``status`` and ``trouble`` are for whoever has the connection to set.
    """

    def __init__(self, path: str, clean: Callable[[str, int], str], longest: int) -> None:
        self.path, self.longest = path, longest
        self.status, self.trouble = 0, ""
        self._clean = clean
        self._began = time.monotonic()
        self._ended = self._first_ms = 0.0
        self._size = self._events = 0
        self._texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._fields: set[str] = set()
        self._calls: dict[int, dict[str, str]] = {}
        self._usage: Mapping[str, Any] = {}
        self._finish = self._said = ""
        self._rest = b""

    def answer(self) -> StreamedAnswer:
        """Return what has come; the texts are without the server's key."""
        clean = self._clean
        ended = self._ended or time.monotonic()
        details = self._usage.get("completion_tokens_details")
        return StreamedAnswer(
            path=self.path,
            status=self.status,
            content=clean("".join(self._texts["content"]), self.longest),
            reasoning=clean("".join(self._texts["reasoning"]), self.longest),
            tool_calls=tuple(
                ToolCall(**{name: clean(text, self.longest) for name, text in call.items()})
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

    def take(self, data: bytes) -> Iterator[StreamPiece]:
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

    def too_much(self) -> bool:
        if len(self._rest) > _LINE:
            self.trouble = "an event without an end"
        elif self._size > self.longest:
            self.trouble = f"more than {self.longest} characters"
        else:
            return False
        return True

    def end(self) -> Iterator[StreamPiece]:
        """Take what came behind the last whole line, and say if that was no end."""
        self._ended = time.monotonic()
        if self.status == 200:
            yield from self.take(b"\n")
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(self._rest) if not self._events else None
            if self.status == 200:
                yield from self._take_event(found)
            else:
                self._said = said_by(found)
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
            self._said = said_by(event)
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
                self._came(*found, size=len(text))
                self._texts[kind].append(text)
                yield StreamPiece(kind, self._clean(text, self.longest))
        self._take_calls(delta.get("tool_calls"))

    def _take_calls(self, calls: object) -> None:
        """Take parts of calls: a name comes once, arguments piece by piece."""
        for call_part in calls if isinstance(calls, list) else ():
            if not isinstance(call_part, dict) or len(self._calls) >= _CALLS:
                continue
            index = call_part.get("index")
            call = self._calls.setdefault(index if type(index) is int else len(self._calls), {})
            function = call_part.get("function")
            parts = {"id": call_part.get("id"), **(function if isinstance(function, dict) else {})}
            for name in ("id", "name", "arguments"):
                if isinstance(text := parts.get(name), str) and text:
                    self._came("tool_calls", size=len(text))
                    call[name] = call.get(name, "") + text if name == "arguments" else text

    def _came(self, *names: str, size: int) -> None:
        self._fields.update(names)
        self._first_ms = self._first_ms or (time.monotonic() - self._began) * 1000
        self._size += size


def _token_count(table: object, name: str) -> int | None:
    value = table.get(name) if isinstance(table, dict) else None
    return value if type(value) is int and 0 <= value < 1 << 40 else None


def said_by(answer: object) -> str:
    """Return what an answer says is wrong: vLLM up to 0.10 has the text at the top, FastAPI too."""
    if not isinstance(answer, dict):
        return ""
    inner = answer.get("error")
    place = inner if isinstance(inner, dict) else answer
    found = place.get("message") or place.get("detail") or inner
    return found if isinstance(found, str) else ""
