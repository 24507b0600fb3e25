"""Ask a server of the OpenAI API for some tokens. Runs on the head."""

from __future__ import annotations

from dataclasses import dataclass

from patchkit.cluster.agent import group_script
from patchkit.foreign import whole_number
from patchkit.http_exchange import HttpAnswer, HttpServer, PathAnswer

_FEW = 16  # tokens: the first ones of some models are special tokens without text
_CHAT = "/v1/chat/completions"
# The fields of an answer that hold text. vLLM sends reasoning_content up to 0.15, and reasoning
# from 0.11.1 on. A completion has `text`; `refusal` replaces content if the model declines.
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal", "text")
EMBEDDING = ("data",)
"""The field with the results in an answer of a model that embeds or scores."""
_ANSWERED = ("choices", "data", "usage")
_MOST_TOKENS = 1 << 40
# Where answers hold the text of an error: vLLM up to 0.10 and FastAPI send it at the top level.
_ERRORS = (
    ("error", "message"),
    ("error", "detail"),
    ("message",),
    ("detail",),
    ("error",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAnswer(PathAnswer):
    """The answer to a request for tokens. ``fields`` are the names of the fields that hold text.

    ``tokens`` is the number that the server counted, None if it gave none. ``finish`` is the
    server's reason for ending the answer, ``said`` the text of its error.
    """

    fields: tuple[str, ...]
    tokens: int | None
    finish: str
    said: str

    @property
    def came(self) -> bool:
        """Return whether a token came, or an embedding."""
        return self.status == 200 and bool(self.fields or self.tokens)


def ask_token(server: HttpServer, model: str, seconds: float) -> TokenAnswer:
    """Ask a model for some tokens by chat, or by what the server has instead of a chat.

    That is a completion, or else an embedding. A request that fails is reported in the answer.
    """
    answer = _ask_first_served(server, model, seconds)
    errors = (answer.value(*keys) for keys in _ERRORS)
    error = next(filter(None, errors), "")

    trouble = answer.trouble
    is_empty = not (trouble or error or any(map(answer.value, _ANSWERED)))
    if answer.status == 200 and is_empty:
        trouble = "what came is no answer of the OpenAI API"

    finish = str(answer.value("choices", 0, "finish_reason") or "")
    return TokenAnswer(
        status=answer.status,
        ms=answer.ms,
        trouble=trouble,
        fields=_text_fields(answer),
        tokens=_token_count(answer),
        finish=server.clean(finish, 40),
        said=server.clean(error) if isinstance(error, str) else "",
    )


def _ask_first_served(server: HttpServer, model: str, seconds: float) -> HttpAnswer:
    """Return the answer of the first path that the server has; that of the chat if it has none."""
    refusals = []
    for path in dict.fromkeys((_CHAT, *group_script.QUESTIONS)):
        question = {"model": model, **group_script.QUESTIONS[path]}
        if "max_tokens" in question:
            question["max_tokens"] = _FEW
        answer = server.ask(path, question, seconds)
        if answer.status not in group_script.NOT_HERE:
            return answer
        refusals.append(answer)
    return refusals[0]


def _text_fields(answer: HttpAnswer) -> tuple[str, ...]:
    """Return the names of the fields that hold text, EMBEDDING if the answer is an embedding."""
    if isinstance(answer.value("data", 0), dict):
        return EMBEDDING

    # A completion has no message: its choice holds the text.
    message = answer.value("choices", 0, "message") or answer.value("choices", 0)
    if not isinstance(message, dict):
        return ()

    texts = {name: text for name, text in message.items() if isinstance(text, str)}
    return tuple(name for name in _TEXTS if texts.get(name))


def _token_count(answer: HttpAnswer) -> int | None:
    try:
        return whole_number(answer.value("usage", "completion_tokens"), _MOST_TOKENS)
    except ValueError:
        return None
