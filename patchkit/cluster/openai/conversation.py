"""Talk with a model: what was said goes with the next question; say why there is no answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from patchkit.cluster.openai.answer_parts import StreamedAnswer
from patchkit.cluster.openai.chat_stream import CHAT, AnswerStream
from patchkit.cluster.openai.http_exchange import ExchangeLimits, HttpAnswer, HttpServer
from patchkit.finding import Finding, finding_from_text
from patchkit.quoting import quoted
from patchkit.units import BYTES_PER_GIB

_ELSEWHERE = "patchkit chat --url http://ADDRESS:PORT; `patchkit up MODEL` serves one here"
_MORE = "patchkit chat --max-tokens 4096; or --no-think, where the chat template takes that"
_NO_SUCH_PATH = (404, 405, 501)
_LOGS = "look into its log: patchkit doctor --log FILE"
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
    # enable_thinking: Qwen3, Gemma 4, Granite 4.2; thinking: DeepSeek-V3.1, Granite 3.2, Holo2
    # (vLLM 0.33.0, docs/features/reasoning_outputs.md).
    template = None if think is None else {"enable_thinking": think, "thinking": think}
    fields = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "chat_template_kwargs": template,
    }
    return {name: value for name, value in fields.items() if value is not None} | dict(more or {})


def explain_no_models(server: HttpServer, listing: HttpAnswer) -> Finding:
    """Return why a server named no model."""
    found = _no_answer(server, listing.status, listing.trouble)
    empty = listing.trouble or "no model" * (listing.status == 200)
    return found or _other_server(server, "/v1/models", listing.status, empty)


def explain_no_answer(
    server: HttpServer, model: str, answer: StreamedAnswer, models: Sequence[str]
) -> Finding | None:
    """Return why a question has no answer, or none to its end; None if it has one.

    A call of a tool is an answer, and so is content that max_tokens ended. ``models`` are those
    that the server names, asked where it refused.
    """
    if found := _no_answer(server, answer.status, answer.trouble):
        return found
    what = answer.said or answer.trouble
    if answer.status != 200 and models and model not in models:
        return _server_finding(
            "server-model", server, model=quoted(model), models=", ".join(models)
        )
    if answer.status in _NO_SUCH_PATH and not models:
        return _other_server(server, answer.path, answer.status, answer.said)
    if answer.status != 200 or (what and not answer.fields):
        logs = quoted("patchkit", "explain", what[:80]) if what else _LOGS
        said = what or "it does not say why"
        return _server_finding(
            "server-token-refused", server, status=answer.status, said=said, logs=logs
        )
    if what:
        return _server_finding("server-token-cut", server, trouble=what, logs=_LOGS)
    if answer.content or answer.tool_calls:
        return None
    tokens = "its" if answer.completion_tokens is None else answer.completion_tokens
    if answer.finish == "length":
        return _server_finding("server-content-length", server, tokens=tokens, more=_MORE)
    return _server_finding("server-content", server, tokens=tokens, finish=answer.finish or "none")


def _no_answer(server: HttpServer, status: int, trouble: str) -> Finding | None:
    """Return that nothing answered, or not without a key."""
    if not status:
        nothing = {"trouble": trouble or "no answer", "units": "", "status": _ELSEWHERE}
        return _server_finding("server-answers", server, **nothing)
    if status in (401, 403):
        found = "the one that was sent is not it" if server.key else "none was sent"
        command = quoted("patchkit", "chat", "--url", server.url, "--key-env", "NAME")
        return _server_finding(
            "server-key-given", server, status=status, found=found, command=command
        )
    return None


def _other_server(server: HttpServer, path: str, status: int, trouble: str) -> Finding:
    look = quoted("curl", "-sS", f"{server.url}/v1/models")
    after = f": {trouble}" if trouble else ""
    return _server_finding(
        "server-other", server, path=path, status=status, trouble=after, look=look
    )


def _server_finding(about: str, server: HttpServer, **fields: Any) -> Finding:
    return finding_from_text("server.toml", about, server.url, url=server.url, **fields)
