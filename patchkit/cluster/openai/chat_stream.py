"""Ask a question of an OpenAI server and take the answer as it streams."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from patchkit.cluster.openai.answer_parts import AnswerParts, StreamedAnswer, StreamPiece
from patchkit.cluster.openai.http_exchange import ExchangeLimits, HttpServer

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

_LONGEST = 1 << 17  # characters of a text that are kept, where an asker does not say
_NOT_HERE = (400, 404, 405, 501)  # answers of a server that has no such question


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
    """A question and its answer; ``pieces`` asks it, once.

    Whoever leaves ``pieces`` early closes it: that ends the connection, and with it the server's
    work. ``longest`` is how many characters of text are taken.
    """

    def __init__(
        self,
        server: HttpServer,
        path: str,
        body: dict[str, Any],
        limits: ExchangeLimits,
        longest: int = _LONGEST,
    ) -> None:
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        self.server, self.limits, self.body = server, limits, body | streamed
        self._parts = AnswerParts(path, server.clean, longest)

    def whole(self) -> StreamedAnswer:
        """Ask, and return the answer when it is whole, or when no more of it comes."""
        for _ in self.pieces():
            pass
        return self.answer()

    def answer(self) -> StreamedAnswer:
        """Return what has come."""
        return self._parts.answer()

    def pieces(self) -> Generator[StreamPiece, None, None]:
        """Ask, and yield the text as it comes."""
        parts = self._parts
        exchange = self.server.stream(parts.path, self.body, self.limits)
        with contextlib.closing(exchange):
            for part in exchange:
                if isinstance(part, int):
                    parts.status = part
                elif isinstance(part, str):
                    parts.trouble = part
                else:
                    yield from parts.take(part)
                if parts.too_much():
                    break
            yield from parts.end()
