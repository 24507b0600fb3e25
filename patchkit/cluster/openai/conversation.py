"""Talk with a model: what was said goes with the next question; say why there is no answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from patchkit.cluster.openai.answer_stream import CHAT, AnswerStream, StreamedAnswer
from patchkit.cluster.openai.http_exchange import ExchangeLimits, HttpServer
from patchkit.finding import Finding, finding_from_text
from patchkit.quoting import quoted
from patchkit.units import BYTES_PER_GIB

_ELSEWHERE = "patchkit chat --url http://ADDRESS:PORT; `patchkit up MODEL` serves one here"
_MORE = "patchkit chat --max-tokens 4096; or --no-think, where the chat template takes that"
_NO_SUCH_PATH = (404, 405, 501)
_LOGS = "look into its log: patchkit doctor --log FILE"
_DAY = 86_400.0  # seconds: whoever reads an answer ends it, and silence does


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
        # Some 250 bytes a token: the longest context is 256 MiB.
        limits = ExchangeLimits(
            seconds=_DAY, silence=self.silence, size=BYTES_PER_GIB, characters=1 << 24
        )
        return AnswerStream(self.server, CHAT, {**self.fields, "messages": messages}, limits)

    def keep(self, question: str, answer: StreamedAnswer) -> None:
        """Add a question and its answer, as far as it came, if it has any content."""
        if answer.content:
            self.messages.append({"role": "user", "content": question})
            self.messages.append({"role": "assistant", "content": answer.content})


def explain_no_answer(
    server: HttpServer, model: str, answer: StreamedAnswer, models: Sequence[str]
) -> Finding | None:
    """Return why a question has no answer, or none to its end; None if it has one.

    A call of a tool is an answer, and so is content that max_tokens ended. ``models`` are those
    that the server names, asked where it refused; without ``model`` that list is what was asked.
    """
    explain = partial(finding_from_text, "server.toml", where=server.url, url=server.url)
    status, what = answer.status, answer.said or answer.trouble
    if not status:
        trouble = answer.trouble or "no answer"
        return explain("server-answers", trouble=trouble, units="", status=_ELSEWHERE)
    if status in (401, 403):
        sent = "the one that was sent is not it" if server.key else "none was sent"
        command = quoted("patchkit", "chat", "--url", server.url, "--key-env", "NAME")
        return explain("server-key-given", status=status, found=sent, command=command)
    if not model or (status in _NO_SUCH_PATH and not models):
        look = quoted("curl", "-sS", f"{server.url}/v1/models")
        after = f": {what}" if what else ""
        return explain("server-other", path=answer.path, status=status, trouble=after, look=look)
    if status != 200 and models and model not in models:
        return explain("server-model", model=quoted(model), models=", ".join(models))
    if status != 200 or (what and not answer.fields):
        logs = quoted("patchkit", "explain", what[:80]) if what else _LOGS
        said = what or "it does not say why"
        return explain("server-token-refused", status=status, said=said, logs=logs)
    if what:
        return explain("server-token-cut", trouble=what, logs=_LOGS)
    if answer.content or answer.tool_calls:
        return None
    tokens = "its" if answer.completion_tokens is None else answer.completion_tokens
    if answer.finish == "length":
        return explain("server-content-length", tokens=tokens, more=_MORE)
    return explain("server-content", tokens=tokens, finish=answer.finish or "none")
