"""Ask a server what shows that its model computes what it should. Runs on the head.

The questions are data, in recipes/answers; ``doctor/answers.py`` judges the replies.
"""

import contextlib
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from string import Template
from typing import Any

from patchkit.cluster.agent.fingerprint import Fingerprint, Start, read_fingerprints
from patchkit.cluster.agent.group_script import read_answer
from patchkit.cluster.agent.node_files import unit_folder
from patchkit.cluster.agent.node_state import read_settings
from patchkit.cluster.openai.server_answers import FoundServer, find_server
from patchkit.errors import HostError, PatchkitError
from patchkit.foreign import positive_number, whole_number
from patchkit.frozen import Fields, Texts, frozen
from patchkit.http_exchange import HttpAnswer, HttpServer, clean
from patchkit.reading import read_text
from patchkit.records import RECIPES, RecordError, read_json, read_toml

_QUESTIONS = RECIPES / "answers/questions.toml"
_PER_TOKEN = 4  # characters, at least two of them in most languages
_MOST_TOKENS = 4096  # of a reply that are read
_LONGEST = 4000  # characters of a text that are read
_LONGEST_TEMPLATE = 65_536  # characters
_LEAST = -1e5  # vLLM sends -9999 for minus infinity
_COMMAND = re.compile(r"^ExecStart=(.*)$", re.MULTILINE)
# In the cache of Hugging Face, and in folders of patchkit.
_COMMIT = re.compile("(?<=/snapshots/)[0-9a-f]{40}(?=/)|(?<=@)[0-9a-f]{12}(?=/)")


@frozen
class Question:
    """A question; ``questions.toml`` explains the fields."""

    about: str
    id: str
    prompt: str
    body: Fields
    words: Texts = ("",)  # any text has it
    chat: bool = False
    reads: str = "text"


@frozen
class Reply:
    """The reply to the question ``id`` of the kind ``about``.

    ``logprobs`` belong to the tokens of the question if these were asked for, else to the
    ``tokens`` of the reply; ``ids`` are the numbers of both. ``thinks`` says that the server split
    off what the model thought, ``tool`` is the call of a tool. ``refusal`` says why there is no
    reply, "" if there is one.
    """

    about: str
    id: str
    text: str = ""
    logprobs: tuple[float, ...] = ()
    tokens: Texts = ()
    ids: tuple[int, ...] = ()
    thinks: bool = False
    tool: str = ""
    is_cut: bool = False
    is_right: bool = True
    status: int = 200
    refusal: str = ""


@frozen
class ModelAnswers:
    """The replies of the first model of a server, after ``seconds`` in all.

    ``start`` says what serves the model, ``former`` how earlier starts answered. ``template`` is
    the chat template of the model's folder, "" if there is none here.
    """

    start: Start
    replies: tuple[Reply, ...]
    former: tuple[Fingerprint, ...] = ()
    seconds: float = 0.0
    template: str = ""


def ask_model(
    url: str,
    cluster: str = "",
    *,
    is_named: bool = True,
    seconds: float = 90.0,
) -> ModelAnswers:
    """Ask the first model of a server all questions for which there is time.

    Unless the user has named ``url``, asks the server that `patchkit up` started last for
    ``cluster`` on this node, if there is one. A question without a reply is reported in the result.
    Raises HostError if the server names no model.
    """
    started = "" if is_named else str(read_settings(cluster).get("url", ""))
    place = find_server(started or url, cluster)
    listing = place.server.ask("/v1/models")
    model = listing.value("data", 0, "id")
    if not isinstance(model, str):
        raise HostError(f"/v1/models of {place.server.url} names no model")

    began = time.monotonic()
    questions = read_toml(tuple[Question, ...], _QUESTIONS, key="question")
    context = positive_number(listing.value("data", 0, "max_model_len"))
    texts = {"fresh": secrets.token_hex(8), "filler": _fill(context)}
    replies: list[Reply] = []
    for question in questions:
        prompt: object = Template(question.prompt).safe_substitute(texts)
        texts[question.id] = str(prompt)
        if prompt == "$ids":
            prompt = replies[-1].ids
        left = began + seconds - time.monotonic()
        replies.append(_ask(place, model, question, prompt, left))

    # A container has the folder elsewhere.
    folder = str(place.started.get("folder") or listing.value("data", 0, "root") or "")
    start = _describe_start(place, model, folder)
    return ModelAnswers(
        start=start,
        replies=tuple(replies),
        former=read_fingerprints(start),
        seconds=round(time.monotonic() - began, 1),
        template=_read_template(folder),
    )


def _fill(context: float) -> str:
    """Return sentences that fill a third of a long text, by the context of the model in tokens."""
    filler = read_toml(Fields, _QUESTIONS, key="filler")
    tokens = min(filler["tokens"], context // 2)
    times = int(tokens * _PER_TOKEN / 3 / len(filler["text"]))
    return str(filler["text"]) * max(times, 1)


def _describe_start(place: FoundServer, model: str, folder: str) -> Start:
    """Return what serves a model; ``folder`` is the path or the name that the server loaded."""
    settings = place.started
    unit = ""
    with contextlib.suppress(PatchkitError, OSError, LookupError):
        unit = read_text(unit_folder() / settings["unit"])

    parts = {
        "vLLM": place.server.ask("/version").value("version") or "",
        "installation": settings.get("venv", settings.get("image", "")),
        "flags": " ".join(_COMMAND.findall(unit)),
    }
    commit = _COMMIT.search(f"{folder}/")
    clean = place.server.clean
    return Start(
        cluster=str(settings.get("name", "")),
        model=clean(model),
        commit=clean(commit[0] if commit else folder, _LONGEST),
        parts={name: clean(str(text), _LONGEST) for name, text in parts.items()},
    )


def _read_template(folder: str) -> str:
    """Return the chat template of a model's folder, "" if none can be read."""
    # A name of the Hub is no folder of the working directory.
    home = Path("/", folder)
    text = ""
    with contextlib.suppress(PatchkitError, RecordError):
        settings = read_text(home / "tokenizer_config.json")
        text = str(read_json(Fields, settings).get("chat_template", ""))
        # transformers prefers this file.
        text = read_text(home / "chat_template.jinja")
    return clean(text, _LONGEST_TEMPLATE)


def _ask(
    place: FoundServer,
    model: str,
    question: Question,
    prompt: object,
    seconds: float,
) -> Reply:
    """Return the reply to a question within ``seconds``."""
    about: Fields = {"about": question.about, "id": question.id}
    if seconds <= 0:
        return Reply(**about, refusal="no time was left")

    path = "/v1/completions"
    given: Fields = {"prompt": prompt}
    if question.chat:
        path = "/v1/chat/completions"
        given = {"messages": [{"role": "user", "content": prompt}]}
    body = {"model": model, "temperature": 0, **given, **question.body}
    answer = place.server.ask(path, body, seconds)

    about["status"] = answer.status
    if refusal := read_answer(place.server, model, answer).refusal:
        return Reply(**about, refusal=refusal)

    try:
        fields = _read_reply(place.server, answer)
    except (ValueError, TypeError, AttributeError):
        return Reply(**about, refusal="an answer of another form")
    if "prompt_logprobs" in body and not fields["logprobs"]:
        return Reply(**about, refusal="an answer without prompt_logprobs")

    is_right = any(word in fields[question.reads] for word in question.words)
    return Reply(**about, is_right=is_right, **fields)


def _read_reply(server: HttpServer, answer: HttpAnswer) -> Fields:
    """Return the fields of a Reply that an answer has.

    Raises ValueError, TypeError and AttributeError for an answer of another form.
    """

    def read(*keys: str | int) -> Any:
        return answer.value("choices", 0, *keys)

    def text(*keys: str | int) -> str:
        return server.clean(read(*keys) or "", _LONGEST)

    # The first entry of each place is the token of the prompt; the first token has no place.
    scores = [
        next(iter(place.values())).get("logprob")
        for place in filter(None, _rows(read("prompt_logprobs")))
    ]
    call = ("message", "tool_calls", 0, "function")
    ids = (*_rows(read("prompt_token_ids")), *_rows(read("token_ids")))
    thoughts = ("reasoning", "reasoning_content")
    generated = read("logprobs", "token_logprobs")
    return {
        "text": text("text") or text("message", "content"),
        "logprobs": tuple(_numbers(scores or _rows(generated))),
        "tokens": tuple(map(str, _rows(read("logprobs", "tokens")))),
        "ids": tuple(map(whole_number, ids)),
        "thinks": any(text("message", name) for name in thoughts),
        "tool": f"{text(*call, 'name')} {text(*call, 'arguments')}",
        "is_cut": read("finish_reason") == "length",
    }


def _rows(value: object) -> list[Any]:
    return value[:_MOST_TOKENS] if isinstance(value, list) else []


def _numbers(values: Iterable[Any]) -> Iterator[float]:
    """Yield logarithms of chances; anything else counts as a token that was never expected."""
    for value in values:
        # Rounding on the server may leave 1e-7 of a certain token.
        is_chance = isinstance(value, int | float) and _LEAST < round(value, 4) <= 0
        yield round(value, 4) if is_chance else _LEAST
