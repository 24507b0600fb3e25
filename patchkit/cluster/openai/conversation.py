"""Talk with a model: what was said goes with the next question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from patchkit.cluster.openai.answer_parts import StreamedAnswer
from patchkit.cluster.openai.chat_stream import CHAT, AnswerStream
from patchkit.cluster.openai.http_exchange import ExchangeLimits, HttpServer
from patchkit.units import BYTES_PER_GIB

_DAY = 86_400.0  # seconds: whoever reads an answer ends it, and silence does
# Some 250 bytes a token: the longest context is 256 MiB.
_BYTES, _CHARACTERS = BYTES_PER_GIB, 1 << 24


@dataclass(kw_only=True)
class Conversation:
    """A talk with one model: ``fields`` go with every request, ``messages`` are what was said.

    ``silence`` is the seconds without a byte after which the server counts as gone.
    """

    server: HttpServer
    fields: Mapping[str, Any]
    silence: float
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, question: str) -> AnswerStream:
        """Return the question, to be asked; it is not part of the talk before it is kept."""
        messages = [*self.messages, {"role": "user", "content": question}]
        limits = ExchangeLimits(seconds=_DAY, silence=self.silence, size=_BYTES)
        body = {**self.fields, "messages": messages}
        return AnswerStream(self.server, CHAT, body, limits, _CHARACTERS)

    def keep(self, question: str, answer: StreamedAnswer) -> None:
        """Add a question and its answer, as far as it came, if it has any content."""
        if answer.content:
            self.messages.append({"role": "user", "content": question})
            self.messages.append({"role": "assistant", "content": answer.content})


def request_fields(
    model: str,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    think: bool | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the fields of a request but its messages; what is None is left to the server.

    ``think`` goes by both names that chat templates have for it; a template ignores the other one.
    ``more`` comes last.
    """
    fields: dict[str, Any] = {"model": model}
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    if temperature is not None:
        fields["temperature"] = temperature
    if think is not None:
        # enable_thinking: Qwen3, Gemma 4, Granite 4.2; thinking: DeepSeek-V3.1, Granite 3.2, Holo2
        # (vLLM 0.33.0, docs/features/reasoning_outputs.md).
        fields["chat_template_kwargs"] = {"enable_thinking": think, "thinking": think}
    return {**fields, **(more or {})}
