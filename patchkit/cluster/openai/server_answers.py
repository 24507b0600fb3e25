"""Ask the server of a model how it is, with its metrics for Prometheus. Runs on the head."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from patchkit.cluster.agent import group_script, processes
from patchkit.cluster.agent.alive_script import (
    find_group_work,
    is_paused,
    read_metrics_signs,
)
from patchkit.cluster.agent.judge import (
    DOUBT,
    Counters,
    ServerLife,
    ServerSigns,
    describe_trouble,
    is_question_refused,
    judge,
    read_counters,
)
from patchkit.cluster.agent.node_state import read_settings
from patchkit.errors import HostError, PatchkitError, UsageError
from patchkit.foreign import read_count, whole_number
from patchkit.http_exchange import HttpAnswer, HttpServer, PathAnswer, clean, usable_key
from patchkit.reading import read_text
from patchkit.records import RECIPES, read_toml

_LINE = re.compile(
    r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)(?: \d+)?"
)
_LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')
_KEY = "VLLM_API_KEY"
_LONGEST = 1 << 16  # characters of a line
_UNASKED = ServerLife(DOUBT, "it was not asked")


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedMetric:
    """A figure: its names, one for each group of releases; the sum of its series, or ``max``.

    ``where`` are labels that a series has to have.
    """

    id: str
    names: tuple[str, ...]
    fold: str = "sum"
    where: Mapping[str, str] = field(default_factory=dict)


_Series = tuple[Mapping[str, str], float]  # labels, and a figure


def read_figures(text: str, wanted: Sequence[WantedMetric]) -> dict[str, float]:
    """Return what a text has of the figures, by their ids; what it does not have is left out."""
    series = _read_series(text, {name for metric in wanted for name in metric.names})
    figures: dict[str, float] = {}
    for metric in wanted:
        rows = next((series[name] for name in metric.names if name in series), [])
        values = [
            value for labels, value in rows if metric.where.items() <= labels.items()
        ]
        if values:
            figures[metric.id] = max(values) if metric.fold == "max" else sum(values)
        elif rows and metric.where:
            figures[metric.id] = (
                0.0  # a counter has no series before the first event of its kind
            )
    return figures


def _read_series(text: str, names: Collection[str]) -> dict[str, list[_Series]]:
    """Return the series of these names; what is no finite number from 0 on is left out."""
    series: dict[str, list[_Series]] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line) if len(line) < _LONGEST else None
        if match is None or match["name"] not in names:
            continue
        with contextlib.suppress(ValueError):
            labels = dict(_LABEL.findall(match["labels"] or ""))
            series.setdefault(match["name"], []).append(
                (labels, read_count(match["value"]))
            )
    return series


_PATIENCE = 120.0  # seconds, where nothing watches: the default of `frozen`
_FEW = 16  # tokens: the first ones of some models are marks that no text is made of
_HELLO = "Say: ready"
# vLLM up to 0.11.0 sends reasoning_content, 0.11.1 to 0.15 both, from 0.16 reasoning; `text` is a
# completion's; `refusal` stands in the place of content where a model declines.
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal", "text")
EMBEDDING = ("data",)  # of models that embed or score
_ANSWERED = ("choices", "data", "usage")
_MODELS = 64  # names that are kept
_MOST_TOKENS = 1 << 40
# The text of an error is at the top from vLLM up to 0.10, and from FastAPI.
_ERRORS = (
    ("error", "message"),
    ("error", "detail"),
    ("message",),
    ("detail",),
    ("error",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAnswer(PathAnswer):
    """How a question was answered: ``fields`` are the names under which text came.

    ``tokens`` are those that the server counted, ``finish`` is its reason to end, ``said`` what it
    says instead of an answer.
    """

    fields: tuple[str, ...] = ()
    tokens: int | None = None
    finish: str = ""
    said: str = ""

    @property
    def came(self) -> bool:
        """Return whether a token came, or an embedding."""
        return self.status == 200 and bool(self.fields or self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAnswers:
    """What a server says of itself. ``key`` is where its key was found, "" for none.

    ``asked`` is the model that the token was asked of; ``token`` is None where none was asked for.
    ``strangers`` listen there, too, so that no key was sent; ``life`` says whether it lives.
    """

    url: str
    key: str = ""
    strangers: tuple[str, ...] = ()
    health: PathAnswer
    version: str = ""
    models: tuple[str, ...] = ()
    listing: PathAnswer = field(default_factory=PathAnswer)
    asked: str = ""
    token: TokenAnswer | None = None
    metrics: PathAnswer = field(default_factory=PathAnswer)
    figures: Mapping[str, float] = field(default_factory=dict)

    life: ServerLife = _UNASKED


def find_key(key_file: str) -> tuple[str, str]:
    """Return the server's key and where it was found: the file that the unit reads, or here.

    "" for none, and for one that no header can hold.
    """
    key, where = os.environ.get(_KEY, ""), "the environment"
    with contextlib.suppress(PatchkitError, OSError, ValueError):
        path = Path(key_file).expanduser()
        for line in (
            read_text(path, limit=1 << 16).splitlines() if path.is_file() else ()
        ):
            name, sign, value = line.strip().partition("=")
            if sign and name.strip() == _KEY:
                key, where = " ".join(shlex.split(value)), key_file
                break
    return (key, where) if key and usable_key(key) else ("", "")


def server_at(url: str, key: str = "") -> HttpServer:
    """Return the server at a URL that a user gave. Raises UsageError for what is none."""
    try:
        return HttpServer(url, key)
    except ValueError as error:
        login = "every user of a host could see a login in it" if "@" in url else ""
        raise UsageError(
            str(error), why=login, hint="write it as http://ADDRESS:PORT"
        ) from None


def ask_server(
    url: str = "",
    key_file: str = "~/.config/patchkit/secrets.env",
    seconds: float = 30.0,
    cluster: str = "",
) -> ServerAnswers:
    """Return what the server answers; ``seconds`` is how long a token may take.

    Without a URL it is the server that was started last in a ``cluster``, on its head. The first
    model that it names is asked. Raises UsageError for what is no URL, HostError where no server of
    the cluster was started.
    """
    group = read_settings(cluster)
    url = url or str(group.get("url", "")) or _raise_no_server(group)
    started = _start_at(group, url)
    strangers = _find_strangers(url, started)
    key, where = ("", "") if strangers else find_key(key_file)
    server = server_at(url, key)
    answers = ServerAnswers(
        url=clean(url), key=where, strangers=strangers, health=PathAnswer()
    )
    health = server.ask("/health")
    if not health.status:
        signs = ServerSigns(
            refused=health.closed,
            metrics_trouble=describe_trouble("/health", health.status, health.trouble),
            work=_find_work(started),
        )
        life = judge(signs, _patience(started))
        return replace(answers, health=health.outcome, life=life)

    # Before the question, whose own request would be counted.
    metrics = server.ask("/metrics")
    answers = replace(
        _ask_models(server, seconds),
        url=answers.url,
        key=where,
        strangers=strangers,
        health=health.outcome,
        metrics=metrics.outcome,
        figures=read_figures(metrics.text, _wanted_metrics()),
    )
    others = "; ".join(strangers) if started else ""
    signs = ServerSigns(other_listeners=others, token_came=True)
    if not (answers.token and answers.token.came):
        signs = _look_further(
            server, read_counters(metrics.text), answers, started, seconds
        )
        signs = replace(signs, other_listeners=others)
    return replace(answers, life=judge(signs, _patience(started)))


def _start_at(group: Mapping[str, Any], url: str) -> Mapping[str, Any]:
    """Return what `up` wrote on a head whose server is at this URL; {} for anything else."""
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


def _raise_no_server(group: Mapping[str, Any]) -> NoReturn:
    if group:
        raise HostError(
            "this node's rank belongs to a server on another node",
            why="the nodes in cluster.toml are in another order than at the last start, which `up` "
            "would replace",
            hint="patchkit up MODEL",
        )
    raise HostError("nothing was started on this node", hint="patchkit up MODEL")


def _find_strangers(url: str, started: Mapping[str, Any]) -> tuple[str, ...]:
    """Return who listens there and must not get the key: not the group's, or another user's."""
    if started:
        return tuple(processes.strangers(url, started["unit"], started["name"]))
    trusted = (0, os.getuid())
    try:
        listeners = processes.listeners_at(url)
    except ValueError:  # it is no URL, which is said later
        return ()
    return tuple(
        f"port {listener.port}: {listener.holder}"
        for listener in listeners
        if listener.user not in trusted
    )


def _patience(started: Mapping[str, Any]) -> float:
    return float(started.get("frozen") or _PATIENCE)


def _find_work(started: Mapping[str, Any]) -> str:
    """Return what shows that a node of the group works, though its server gives no token."""
    settings = dict(started)
    # The file may have been edited, which doctor says.
    with contextlib.suppress(LookupError, TypeError):
        return find_group_work(settings, settings["workers"].values(), 0)
    return ""


def _look_further(
    server: HttpServer,
    former: Counters,
    answers: ServerAnswers,
    started: Mapping[str, Any],
    seconds: float,
) -> ServerSigns:
    """Return what shows of a server that gave no token while it was asked for one."""
    work = _find_work(started)  # first: what it was done for counts then
    metrics = server.ask("/metrics")
    reply = answers.token or answers.listing
    late = answers.token is not None and reply.ms >= seconds * 1000
    refused = is_question_refused(reply.status)
    refusal = "" if late else _describe_refusal(answers)
    return replace(
        read_metrics_signs(metrics, former or read_counters(metrics.text), server.url),
        token_wait_s=reply.ms / 1000 if late else 0.0,
        token_refusal="" if refused else refusal,
        question_refusal=refusal if refused else "",
        paused=is_paused(server),
        work=work,
    )


def _describe_refusal(answers: ServerAnswers) -> str:
    """Return what the server says instead of a token."""
    token, listing = answers.token, answers.listing
    if token is None:
        return (
            listing.trouble or f"/v1/models says {listing.status}, and names no model"
        )
    if token.status not in (0, 200):
        return f"HTTP {token.status} {token.said}".rstrip()
    return token.trouble or token.said or "an answer without a token"


def _wanted_metrics() -> tuple[WantedMetric, ...]:
    return read_toml(
        tuple[WantedMetric, ...], RECIPES / "doctor" / "server.toml", key="metric"
    )


def _ask_models(server: HttpServer, seconds: float) -> ServerAnswers:
    """Return which models a server names, and what the first one of them answers."""
    listing = server.ask("/v1/models")
    rows = listing.value("data")
    rows = (
        [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    )
    names = [row.get("id") for row in rows[:_MODELS]]
    models = tuple(server.clean(name) for name in names if isinstance(name, str))
    asked = models[0] if models else ""
    token = _ask_token(server, asked, seconds) if asked else None
    version = server.ask("/version").value("version")
    return ServerAnswers(
        url="",
        health=PathAnswer(),
        version=server.clean(version, 60) if isinstance(version, str) else "",
        models=models,
        listing=listing.outcome,
        asked=asked,
        token=token,
    )


def _ask_token(server: HttpServer, model: str, seconds: float) -> TokenAnswer:
    """Ask for some tokens by chat, by completion, or an embedding: the first that is served."""
    answer = _ask_first_served(server, model, seconds)
    error = next(filter(None, (answer.value(*keys) for keys in _ERRORS)), "")
    trouble = answer.trouble
    if answer.status == 200 and not (
        trouble or error or any(map(answer.value, _ANSWERED))
    ):
        trouble = "what came is no answer of the OpenAI API"
    return TokenAnswer(
        status=answer.status,
        ms=answer.ms,
        trouble=trouble,
        fields=_text_fields(answer),
        tokens=_token_count(answer),
        finish=server.clean(str(answer.value("choices", 0, "finish_reason") or ""), 40),
        said=server.clean(error) if isinstance(error, str) else "",
    )


def _ask_first_served(server: HttpServer, model: str, seconds: float) -> HttpAnswer:
    """Return the first answer to a question that the server has; of a chat, if it has none."""
    common = {"model": model, "temperature": 0, "max_tokens": _FEW}
    questions = {
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": _HELLO}],
            **common,
        },
        "/v1/completions": {"prompt": _HELLO, **common},
    }
    for path, question in group_script.QUESTIONS.items():
        questions.setdefault(path, {"model": model, **question})

    refusals = []
    for path, question in questions.items():
        answer = server.ask(path, question, seconds)
        if answer.status not in group_script.NOT_HERE:
            return answer
        refusals.append(answer)
    return refusals[0]


def _text_fields(answer: HttpAnswer) -> tuple[str, ...]:
    """Return the names under which an answer has text, or what stands in its place."""
    if isinstance(answer.value("data", 0), dict):
        return EMBEDDING
    choice = answer.value("choices", 0)
    message = answer.value("choices", 0, "message")
    place = message if message is not None else choice  # a completion has no message
    if not isinstance(place, dict):
        return ()
    return tuple(
        name for name in _TEXTS if isinstance(place.get(name), str) and place[name]
    )


def _token_count(answer: HttpAnswer) -> int | None:
    try:
        return whole_number(answer.value("usage", "completion_tokens"), _MOST_TOKENS)
    except ValueError:
        return None
