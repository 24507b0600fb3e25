"""Ask a model's server for its state and its metrics, and what shows that it computes as it should.

Runs on the head. The questions are data, in recipes/answers; ``doctor/answers.py`` judges the
replies.
"""

import contextlib
import os
import re
import secrets
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from string import Template
from typing import Any, NoReturn

from patchkit.cluster.agent import processes
from patchkit.cluster.agent.alive_script import (
    find_group_work,
    is_paused,
    read_metrics_signs,
)
from patchkit.cluster.agent.fingerprint import Fingerprint, Start, read_fingerprints
from patchkit.cluster.agent.group_script import (
    Settings,
    TokenAnswer,
    ask_token,
    read_answer,
)
from patchkit.cluster.agent.judge import (
    DOUBT,
    ServerLife,
    ServerSigns,
    describe_trouble,
    is_question_refused,
    judge,
    read_counters,
    read_series,
)
from patchkit.cluster.agent.node_files import unit_folder
from patchkit.cluster.agent.node_state import read_settings
from patchkit.errors import HostError, PatchkitError, UsageError
from patchkit.foreign import positive_number, read_count, whole_number
from patchkit.frozen import Fields, Texts, frozen
from patchkit.http_exchange import HttpAnswer, HttpServer, PathAnswer, clean, usable_key
from patchkit.reading import read_text, user_path
from patchkit.records import RECIPES, RecordError, read_json, read_toml

_KEY = "VLLM_API_KEY"
SECRETS = "~/.config/patchkit/secrets.env"
_KEY_LINE = re.compile(rf"^[ \t]*{_KEY}[ \t]*=(.*)$", re.MULTILINE)
_MOST_KEYS = 1 << 16  # bytes of a file with keys
# The chat comes first: its answer shows how the server splits off what a model thinks.
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/pooling")
_FEW = 16  # tokens: the first ones of some models are special tokens without text
_MODELS = 64  # names: further models of a server are left out
_MOMENT = 1.0  # seconds between two reads of the counters
_LARGEST = 1e12  # of a figure: a server may say anything
_PATIENCE = 120.0  # seconds for a server that nothing watches: the default of `frozen`
_UNASKED = ServerLife(DOUBT, "it was not asked")


@frozen
class WantedMetric:
    """A figure to read. ``names`` are its names in the metrics of different releases.

    ``fold`` says how its series become one figure: "sum" or "max". ``where`` is a label that a
    series needs in order to count, such as ``status="5xx"``, "" for none.
    """

    id: str
    names: Texts
    fold: str = "sum"
    where: str = ""


def read_figures(text: str) -> dict[str, float]:
    """Return the metrics of server.toml by id, without those that a text lacks or spoils."""
    file = RECIPES / "doctor/server.toml"
    series = read_series(text)
    figures: dict[str, float] = {}
    for metric in read_toml(tuple[WantedMetric, ...], file, key="metric"):
        fold = max if metric.fold == "max" else sum
        # Without rows there is no figure.
        with contextlib.suppress(ValueError, StopIteration):
            rows = next(filter(None, map(series.get, metric.names)))
            values = [
                min(read_count(value), _LARGEST)
                for labels, value in rows
                if metric.where in labels
            ]
            # A counter has no series for a label before the first such event.
            figures[metric.id] = fold(values or [0.0])
    return figures


@frozen
class ServerSpeed:
    """How fast a server generates for ``requests``: tokens per second, now and at most.

    ``most`` is what the memory's bandwidth allows, 0 if unknown. ``accepted`` is the part of all
    drafted tokens that were accepted, None without drafts; ``drafted`` are the tokens of a draft.
    """

    now: float
    requests: float
    most: float = 0.0
    accepted: float | None = None
    drafted: float = 0.0


@frozen
class ServerAnswers:
    """The answers of a server. ``key`` says where its key was found, "" if no key was sent.

    ``token`` is the answer to the question for a token, None if the server was not asked.
    ``strangers`` are other programs that listen at ``url``: with any, no key is sent. ``life`` is
    the judgement whether the server lives. ``speed`` is None if nobody asked, or it is unknown.
    """

    url: str
    key: str
    strangers: Texts
    health: PathAnswer
    version: str = ""
    models: Texts = ()
    listing: PathAnswer = field(default_factory=PathAnswer)
    token: TokenAnswer | None = None
    metrics: PathAnswer = field(default_factory=PathAnswer)
    figures: Mapping[str, float] = field(default_factory=dict)

    life: ServerLife = _UNASKED
    speed: ServerSpeed | None = None


def find_key(key_file: str) -> tuple[str, str]:
    """Return the server's key, and the file or "the environment" that has it; "" for none.

    The key is that of ``key_file``, which the unit reads, too, or else of the variable
    VLLM_API_KEY. A file that cannot be read counts as one without a key, and a key that an HTTP
    header cannot hold as no key.
    """
    key = os.environ.get(_KEY, "")
    place = "the environment"
    with contextlib.suppress(PatchkitError, OSError, ValueError):
        text = read_text(user_path(key_file), limit=_MOST_KEYS)
        if line := _KEY_LINE.search(text):
            key = " ".join(shlex.split(line[1]))
            place = key_file

    key = usable_key(key)
    return key, place if key else ""


def server_at(url: str, key: str = "") -> HttpServer:
    """Return the server at a URL that a user gave. Raises UsageError for anything but a URL."""
    try:
        return HttpServer(url, key)
    except ValueError as error:
        login = "every user of a host could see a login in it" if "@" in url else ""
        raise UsageError(
            str(error), why=login, hint="write it as http://ADDRESS:PORT"
        ) from None


@frozen
class FoundServer:
    """A server to ask. ``started`` are the settings of its start by `up`, {} for another server.

    ``key`` and ``strangers`` are as in ServerAnswers.
    """

    server: HttpServer
    started: Settings
    key: str
    strangers: Texts


def find_server(url: str, cluster: str, key_file: str = SECRETS) -> FoundServer:
    """Return the server at a URL, or without one the server that `up` started for ``cluster``.

    Raises UsageError if ``url`` is no URL, HostError if no server was started here.
    """
    group = read_settings(cluster)
    url = url or str(group.get("url", "")) or _raise_no_server(group)
    started = _start_at(group, url)

    strangers = _find_strangers(url, started)
    key, place = ("", "") if strangers else find_key(key_file)
    server = server_at(url, key)
    return FoundServer(server=server, started=started, key=place, strangers=strangers)


def ask_server(
    url: str = "",
    key_file: str = SECRETS,
    seconds: float = 30.0,
    cluster: str = "",
    speed: bool = False,
) -> ServerAnswers:
    """Ask a server for its health, models, version and metrics, and its first model for a token.

    Waits up to ``seconds`` for the token. Without ``url``, asks the server that `patchkit up`
    started last for ``cluster`` on this node. A server that fails or is silent is reported in the
    result. Raises UsageError if ``url`` is no URL, HostError if no server was started here.
    """
    found = find_server(url, cluster, key_file)
    server = found.server
    started = found.started

    health = server.ask("/health")
    patience = float(started.get("frozen") or _PATIENCE)
    answers = ServerAnswers(
        url=clean(server.url),
        key=found.key,
        strangers=found.strangers,
        health=health.outcome,
    )
    if not health.status:
        signs = ServerSigns(
            refused=health.closed,
            metrics_trouble=describe_trouble("/health", health.status, health.trouble),
            work=_find_work(started),
        )
        return replace(answers, life=judge(signs, patience))

    # Read the metrics before the model is asked: its counters would include that request.
    metrics = server.ask("/metrics")
    figures = read_figures(metrics.text)
    rate = _find_speed(server, figures, started) if speed else None
    listing = server.ask("/v1/models")
    token = ask_token(server, listing, seconds, _FEW, _PATHS)
    version = server.ask("/version").value("version") or ""

    signs = ServerSigns(token_came=True)
    if not token.came:
        signs = _find_signs(server, metrics, token, started, seconds)
    if started:
        signs = replace(signs, other_listeners="; ".join(found.strangers))

    return replace(
        answers,
        version=server.clean(str(version), 60),
        models=_model_names(server, listing),
        listing=listing.outcome,
        token=token,
        metrics=metrics.outcome,
        figures=figures,
        life=judge(signs, patience),
        speed=rate,
    )


def _find_speed(
    server: HttpServer, former: Mapping[str, float], started: Settings
) -> ServerSpeed | None:
    """Read the metrics a moment after the ``former`` ones; return the speed, None if unknown.

    ``started`` has what bounds it: bytes of weights for a token, of the cache, and per second.
    """
    begin = time.monotonic()
    time.sleep(_MOMENT)
    figures = read_figures(server.ask("/metrics").text)
    seconds = time.monotonic() - begin
    if not figures.keys() & former.keys() >= {"generated", "running", "kv-usage"}:
        return None

    tokens = max(figures["generated"] - former["generated"], 0.0)
    requests = max(figures["running"], 1.0)
    drafts = max(figures.get("drafts", 0.0), 1.0)
    drafted = figures.get("drafted", 0.0)
    accepted = min(figures.get("accepted", 0.0), drafted)

    most = 0.0
    with contextlib.suppress(ValueError, TypeError):
        weights, cache, bandwidth = map(positive_number, started.get("speed", ()))
        read_bytes = weights + min(figures["kv-usage"], 1.0) * cache
        steps = min(bandwidth / read_bytes, _LARGEST) if weights else 0.0
        most = steps * requests * (1 + accepted / drafts)

    return ServerSpeed(
        now=tokens / seconds,
        requests=requests,
        most=most,
        accepted=accepted / drafted if drafted else None,
        drafted=drafted / drafts,
    )


def _start_at(group: Settings, url: str) -> Settings:
    """Return the settings that `up` wrote if they are complete and name this URL, otherwise {}."""
    match group:
        case {
            "url": place,
            "id": str(),
            "unit": str(),
            "name": str(),
            "workers": dict(),
            "watts": int() | float(),
            "frozen": int() | float(),
        } if place == url:
            return group
        case _:
            return {}


def _raise_no_server(group: Settings) -> NoReturn:
    if group:
        raise HostError(
            "this node's rank belongs to a server on another node",
            why="the nodes in cluster.toml are in another order than at the last start, which `up` "
            "would replace",
            hint="patchkit up MODEL",
        )
    raise HostError("nothing was started on this node", hint="patchkit up MODEL")


def _find_strangers(url: str, started: Settings) -> Texts:
    """Return the programs that listen at a URL and must not get the key.

    At a server that `up` started these are all programs outside its group; at any other, those of
    other users than root and the caller.
    """
    if started:
        return tuple(processes.strangers(url, started["unit"], started["name"]))
    try:
        listeners = processes.listeners_at(url)
    except ValueError:  # ``url`` is no URL: server_at() reports that
        return ()

    trusted = (0, os.getuid())
    return tuple(
        f"port {listener.port}: {listener.holder}"
        for listener in listeners
        if listener.user not in trusted
    )


def _find_work(started: Settings) -> str:
    """Return what shows that a node of the group is at work though no token comes, or ""."""
    settings = dict(started)

    # Settings that somebody edited may lack keys: doctor reports that.
    with contextlib.suppress(LookupError, TypeError):
        return find_group_work(settings, settings["workers"].values(), 0)
    return ""


def _find_signs(
    server: HttpServer,
    before: HttpAnswer,
    token: TokenAnswer,
    started: Settings,
    seconds: float,
) -> ServerSigns:
    """Return the signs of life of a server that gave no ``token`` within ``seconds``.

    ``before`` has its metrics from before it was asked.
    """
    work = _find_work(started)  # before the requests below, which cause work themselves
    metrics = server.ask("/metrics")
    former = read_counters(before.text) or read_counters(metrics.text)
    signs = replace(
        read_metrics_signs(metrics, former, server.url),
        paused=is_paused(server),
        work=work,
    )

    if token.ms >= seconds * 1000:
        return replace(signs, token_wait_s=token.ms / 1000)
    if is_question_refused(token.status):
        return replace(signs, question_refusal=token.refusal)
    return replace(signs, token_refusal=token.refusal)


def _model_names(server: HttpServer, listing: HttpAnswer) -> Texts:
    rows = listing.value("data")
    if not isinstance(rows, list):
        return ()

    names = [row.get("id") for row in rows if isinstance(row, dict)]
    return tuple(
        server.clean(name) for name in names[:_MODELS] if isinstance(name, str)
    )


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
