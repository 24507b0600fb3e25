"""Ask the server of a model how it is, with its metrics for Prometheus. Runs on the head."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from patchkit.cluster.agent.node_files import config_folder
from patchkit.cluster.openai.http_exchange import HttpServer, PathAnswer, clean
from patchkit.errors import HostError, PatchkitError
from patchkit.reading import read_text
from patchkit.records import RECIPES, read_toml

_LINE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)(?: \d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_KEY = "VLLM_API_KEY"
_LONGEST = 1 << 16  # characters of a line


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedMetric:
    """A figure: its names, one for each group of releases; the sum of its series, or ``max``.

    ``where`` are labels that a series has to have.
    """

    id: str
    names: tuple[str, ...]
    fold: str = "sum"
    where: Mapping[str, str] = field(default_factory=dict)


def read_figures(text: str, wanted: Sequence[WantedMetric]) -> dict[str, float]:
    """Return what a text has of the figures, by their ids; what it does not have is left out."""
    names = {name for metric in wanted for name in metric.names}
    series: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        if len(line) < _LONGEST and (match := _LINE.fullmatch(line)) and match["name"] in names:
            with contextlib.suppress(ValueError):
                row = dict(_LABEL.findall(match["labels"] or "")), float(match["value"])
                series.setdefault(match["name"], []).append(row)
    found: dict[str, float] = {}
    for metric in wanted:
        rows = next((series[name] for name in metric.names if name in series), [])
        values = [
            value
            for labels, value in rows
            if metric.where.items() <= labels.items() and math.isfinite(value)
        ]
        if values:
            found[metric.id] = max(values) if metric.fold == "max" else sum(values)
        elif rows and metric.where:
            found[metric.id] = 0.0  # a counter has no series before the first event of its kind
    return found


_FEW = 16  # tokens: the first ones of some models are marks that no text is made of
_HELLO = "Say: ready"
_NOT_HERE = (400, 404, 405, 501)  # answers of a server that has no such question
# vLLM up to 0.11.0 sends reasoning_content, 0.11.1 to 0.15 both, from 0.16 reasoning; `text` is a
# completion's; `refusal` stands in the place of content where a model declines.
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal", "text")
_ANSWERED = ("choices", "usage")
_MODELS = 64  # names that are kept
# The text of an error is at the top from vLLM up to 0.10, and from FastAPI.
_ERRORS = (("error", "message"), ("error", "detail"), ("message",), ("detail",), ("error",))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAnswers:
    """What a server says of itself. ``key`` is where its key was found, "" for none.

    ``asked`` is the model that the token was asked of; ``token`` is None where none was asked for.
    """

    url: str
    key: str = ""
    health: PathAnswer
    version: str = ""
    models: tuple[str, ...] = ()
    listing: PathAnswer = field(default_factory=PathAnswer)
    asked: str = ""
    token: TokenAnswer | None = None
    metrics: PathAnswer = field(default_factory=PathAnswer)
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def silence(self) -> str:
        """Return why no token came; "" if one came, or none was to be had of this server."""
        if not self.health.status:
            return self.health.trouble or "no answer"
        token = self.token
        if token is None:
            return "" if self.listing.status else self.listing.trouble
        if token.fields or token.tokens:
            return ""
        if token.status in (0, 200):
            waiting = self.figures.get("waiting", 0)
            why = token.trouble or token.said or "an answer without a token"
            return f"{why}; {waiting:.0f} requests wait before" if waiting else why
        return f"HTTP {token.status} {token.said}" if token.status >= 500 else ""


def find_key(key_file: str) -> tuple[str, str]:
    """Return the server's key and where it was found: the file that the unit reads, or here.

    "" for none, and for one that no header can hold.
    """
    key, where = os.environ.get(_KEY, ""), "the environment"
    with contextlib.suppress(PatchkitError, OSError, ValueError):
        path = Path(key_file).expanduser()
        for line in read_text(path, limit=1 << 16).splitlines() if path.is_file() else ():
            name, sign, value = line.strip().partition("=")
            if sign and name.strip() == _KEY:
                key, where = " ".join(shlex.split(value)), key_file
                break
    return (key, where) if key and key.isascii() and key.isprintable() else ("", "")


def ask_server(
    url: str = "",
    key_file: str = "~/.config/patchkit/secrets.env",
    seconds: float = 30.0,
    cluster: str = "",
) -> ServerAnswers:
    """Return what the server answers; ``seconds`` is how long a token may take.

    Without a URL it is the server that was started last in a ``cluster``, on its head. The first
    model that it names is asked. Raises UsageError for what is no URL.
    """
    try:
        place = config_folder(cluster) / "group.json"
        url = url or json.loads(place.read_text(encoding="utf-8"))["url"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise HostError(f"group.json does not say where the server is: {error}") from None
    key, where = find_key(key_file)
    server = HttpServer(url, key)
    health = server.ask("/health")
    if not health.status:
        return ServerAnswers(url=clean(url), key=where, health=health.outcome)
    # Before the question, whose own request would be counted.
    said = server.ask("/metrics")
    wanted = read_toml(tuple[WantedMetric, ...], RECIPES / "doctor" / "server.toml", key="metric")
    text = said.body.decode(errors="replace") if said.status == 200 else ""
    listing = server.ask("/v1/models")
    rows = listing.value("data")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    names = [row.get("id") for row in rows[:_MODELS]]
    models = tuple(server.clean(name) for name in names if isinstance(name, str))
    asked = models[0] if models else ""
    token = _ask_token(server, asked, seconds) if asked else None
    version = server.ask("/version").value("version")
    return ServerAnswers(
        url=clean(url),
        key=where,
        health=health.outcome,
        version=server.clean(version, 60) if isinstance(version, str) else "",
        models=models,
        listing=listing.outcome,
        asked=asked,
        token=token,
        metrics=said.outcome,
        figures=read_figures(text, wanted),
    )


def _ask_token(server: HttpServer, model: str, seconds: float) -> TokenAnswer:
    """Ask for some tokens by chat; where that is not served, as for a base model, by completion."""
    common = {"model": model, "temperature": 0, "max_tokens": _FEW}
    messages = [{"role": "user", "content": _HELLO}]
    answer = server.ask("/v1/chat/completions", {"messages": messages, **common}, seconds)
    if answer.status in _NOT_HERE:
        other = server.ask("/v1/completions", {"prompt": _HELLO, **common}, seconds)
        answer = other if other.status == 200 else answer
    said = next(filter(None, (answer.value(*keys) for keys in _ERRORS)), "")
    place: tuple[str | int, ...] = ("choices", 0, "message")
    if answer.value(*place) is None:  # a completion
        place = ("choices", 0)
    texts = {name: answer.value(*place, name) for name in _TEXTS}
    count, trouble = answer.value("usage", "completion_tokens"), answer.trouble
    if answer.status == 200 and not (trouble or said or any(map(answer.value, _ANSWERED))):
        trouble = "what came is no answer of the OpenAI API"
    return TokenAnswer(
        status=answer.status,
        ms=answer.ms,
        trouble=trouble,
        fields=tuple(name for name, text in texts.items() if text and isinstance(text, str)),
        tokens=count if type(count) is int and 0 <= count < 1 << 40 else None,
        finish=server.clean(str(answer.value("choices", 0, "finish_reason") or ""), 40),
        said=server.clean(said) if isinstance(said, str) else "",
    )
