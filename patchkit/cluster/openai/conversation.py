"""Talk with a model through the `openai` client: what was said goes with the next question."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from patchkit.cluster.openai.http_exchange import CHAT, ODD, HttpServer, token_count
from patchkit.finding import Finding, finding_from_text
from patchkit.quoting import quoted

# vLLM up to 0.11.0 sends reasoning_content, 0.11.1 to 0.15 both with one text, from 0.16 reasoning.
# `refusal` stands in the place of content where a model declines.
_NAMES: Mapping[Literal["reasoning", "content"], tuple[str, ...]] = {
    "reasoning": ("reasoning", "reasoning_content"),
    "content": ("content", "refusal"),
}
_CALLS = 64  # calls of tools in an answer
_CHARACTERS = 1 << 24  # of an answer, at most
_LARGEST_EVENT = 1 << 20  # bytes; of an answer that is no stream, all
_BLANK_LINE = re.compile(rb"\n\n|\r\r|\r\n\r\n")
_ELSEWHERE = "patchkit chat --url http://ADDRESS:PORT; `patchkit up MODEL` serves one here"
_MORE = "patchkit chat --max-tokens 4096; or --no-think, where the chat template takes that"
_NO_SUCH_PATH = (404, 405, 501)
_LOGS = "look into its log: patchkit doctor --log FILE"


@dataclass(kw_only=True)
class ChatAnswer:
    """What has come for a question; ``status`` is 0 where nothing did.

    ``first_ms`` is when the first text came, None for none; ``finish`` the server's reason to end.
    ``said`` is what it says instead of an answer, ``trouble`` what went wrong on the way; the
    counts of tokens are the server's.
    """

    status: int = 0
    content: str = ""
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    finish: str = ""
    first_ms: float | None = None
    ms: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    said: str = ""
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """A piece of an answer's text, as it comes."""

    kind: Literal["reasoning", "content"]
    text: str


@dataclass(kw_only=True)
class Conversation:
    """A talk with one model: ``fields`` go with every request, ``messages`` are what was said.

    ``silence`` is the seconds without a byte after which the server counts as gone.
    """

    server: HttpServer
    fields: Mapping[str, Any]
    silence: float
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, question: str, answer: ChatAnswer) -> Generator[StreamPiece, None, None]:
        """Yield the text of an answer as it comes, and write down what is known of it.

        Whoever leaves early closes the connection, and with it ends the server's work. The question
        is not part of the talk before it is kept. The extra ``chat`` has to be installed.
        """
        openai: Any = importlib.import_module("openai")  # takes half a second
        began, clean = time.monotonic(), self.server.clean
        # No proxy of the environment is asked and no redirection followed: the key goes nowhere.
        alone: dict[str, Any] = {"trust_env": False, "follow_redirects": False}
        http = openai.DefaultHttpxClient(**alone, event_hooks={"response": [_bound_events]})
        timeout = openai.Timeout(self.silence, connect=5.0)
        settings = {"max_retries": 0, "timeout": timeout, "http_client": http}
        url, key = f"{self.server.url.rstrip('/')}/v1", self.server.key or "none"
        contents: list[str] = []
        left = _CHARACTERS
        try:
            with (
                openai.OpenAI(base_url=url, api_key=key, **settings) as client,
                client.chat.completions.create(
                    model=self.fields["model"],
                    messages=[*self.messages, {"role": "user", "content": question}],
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body=self.fields,
                ) as chunks,
            ):
                answer.status = 200
                for piece in _take_chunks(chunks, answer):
                    answer.first_ms = answer.first_ms or (time.monotonic() - began) * 1000
                    if (left := left - len(piece.text)) < 0:
                        answer.trouble = f"more than {_CHARACTERS} characters"
                        break
                    contents += [piece.text] if piece.kind == "content" else []
                    yield StreamPiece(piece.kind, clean(piece.text, _CHARACTERS))
        except openai.APIStatusError as error:
            body = error.body if isinstance(error.body, dict) else {"message": error.body}
            said = body.get("message") or body.get("detail")
            answer.status, answer.said = error.status_code, str(said or "")
        except openai.APITimeoutError:
            answer.trouble = f"no answer in {self.silence:.0f} s"
        except openai.APIConnectionError as error:
            cut = "the connection ended in the middle"
            answer.trouble = cut if answer.status else str(error.__cause__ or error)
        except openai.APIError as error:  # within a stream
            answer.said = error.message
        except (ValueError, TypeError, AttributeError, LookupError):
            answer.trouble = ODD
        finally:
            answer.ms = (time.monotonic() - began) * 1000
            answer.said, answer.trouble = clean(answer.said), clean(answer.trouble)
            answer.content = clean("".join(contents), _CHARACTERS)


def _bound_events(response: Any) -> None:
    """Let a response raise ValueError at an event without an end: its reader has no limit."""
    whole = response.iter_bytes

    def bounded() -> Iterator[bytes]:
        size = 0
        for part in whole():
            *ended, rest = _BLANK_LINE.split(part)
            size = len(rest) if ended else size + len(rest)
            if size > _LARGEST_EVENT:
                raise ValueError("an event without an end")
            yield part

    response.iter_bytes = bounded


def _take_chunks(chunks: Iterator[Any], answer: ChatAnswer) -> Iterator[StreamPiece]:
    """Yield the texts of a stream; write down its calls of tools, its counts and its end."""
    events, texts = 0, 0
    calls: dict[object, dict[str, str]] = {}
    for chunk in chunks:
        events += 1
        if usage := chunk.usage:
            details = usage.completion_tokens_details
            answer.prompt_tokens = token_count(usage.prompt_tokens)
            answer.completion_tokens = token_count(usage.completion_tokens)
            answer.reasoning_tokens = token_count(details and details.reasoning_tokens)
        choice = chunk.choices[0] if chunk.choices else None
        if choice is None or choice.index:
            continue  # the first of several answers alone
        answer.finish = str(choice.finish_reason or answer.finish)[:40]
        for kind, names in _NAMES.items():
            # Of an empty text and of null the next name counts.
            if text := next(filter(None, (getattr(choice.delta, name, "") for name in names)), ""):
                texts += 1
                yield StreamPiece(kind, text)
        for part in choice.delta.tool_calls or ():
            if part.index not in calls and len(calls) >= _CALLS:
                break
            # A name comes once, or again with each part; arguments come piece by piece.
            call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
            call["id"], call["name"] = part.id or call["id"], part.function.name or call["name"]
            call["arguments"] += part.function.arguments or ""
            answer.tool_calls = list(calls.values())
    if not events:
        answer.trouble = ODD
    elif not answer.finish and (texts or calls):
        answer.trouble = "the stream ended in the middle"


def explain_no_answer(
    server: HttpServer, model: str, answer: ChatAnswer, models: Sequence[str]
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
        path, after = CHAT if model else "/v1/models", f": {what}" if what else ""
        return explain("server-other", path=path, status=status, trouble=after, look=look)
    if status != 200 and models and model not in models:
        return explain("server-model", model=quoted(model), models=", ".join(models))
    if status != 200 or (what and answer.first_ms is None):
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
