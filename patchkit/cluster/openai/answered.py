"""Judge one answer of a server for who asked: why there is none, or not a whole one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from patchkit.cluster.openai.answer_parts import StreamedAnswer
from patchkit.cluster.openai.http_exchange import HttpAnswer, HttpServer
from patchkit.finding import Finding, finding_from_text
from patchkit.quoting import quoted

_ELSEWHERE = "patchkit chat --url http://ADDRESS:PORT; `patchkit up MODEL` serves one here"
_MORE = "patchkit chat --max-tokens 4096; or --no-think, where the chat template takes that"
_NO_SUCH_PATH = (404, 405, 501)
_LOGS = "look into its log: patchkit doctor --log FILE"


def unlisted(server: HttpServer, listing: HttpAnswer) -> Finding:
    """Return why a server named no model."""
    found = _no_answer(server, listing.status, listing.trouble)
    empty = listing.trouble or "no model" * (listing.status == 200)
    return found or _other_server(server, "/v1/models", listing.status, empty)


def unanswered(
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
