"""Ask the server of a model how it is, its metrics for Prometheus as well. Runs on the head."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from patchkit.cluster.agent.node_files import config_folder
from patchkit.cluster.openai.answer_stream import StreamedAnswer, ask_anyhow
from patchkit.cluster.openai.api_key import SECRETS, find_key
from patchkit.cluster.openai.http_exchange import (
    HttpAnswer,
    HttpServer,
    clean,
    list_models,
)
from patchkit.errors import HostError
from patchkit.records import RECIPES, read_toml, record

_LINE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)(?: \d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PathAnswer:
    """How a path answered: ``status`` is 0 with ``trouble`` where it did not."""

    status: int = 0
    ms: float = 0.0
    trouble: str = ""


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
    listing: PathAnswer = PathAnswer()
    asked: str = ""
    token: StreamedAnswer | None = None
    metrics: PathAnswer = PathAnswer()
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def silence(self) -> str:
        """Return why no token came; "" if one came, or none was to be had of this server."""
        if not self.health.status:
            return self.health.trouble or "no answer"
        token = self.token
        if token is None:
            return "" if self.listing.status else self.listing.trouble
        if token.first_ms is not None or token.completion_tokens:
            return ""
        if token.status in (0, 200):
            waiting = self.figures.get("waiting", 0)
            why = token.trouble or token.said or "an answer without a token"
            return f"{why}; {waiting:.0f} requests wait before" if waiting else why
        return f"HTTP {token.status} {token.said}" if token.status >= 500 else ""


@cache
def wanted_metrics() -> list[dict[str, Any]]:
    """Return the figures that ``ask_server`` is to find, as its argument ``metrics``."""
    return list(
        read_toml(tuple[dict[str, Any], ...], RECIPES / "doctor" / "server.toml", key="metric")
    )


def ask_server(
    url: str,
    model: str = "",
    key_file: str = SECRETS,
    metrics: Sequence[dict[str, Any]] = (),
    seconds: float = 30.0,
) -> dict[str, Any]:
    """Return the answers as JSON takes them; ``seconds`` is how long a token may take.

    Without ``model`` the first one that the server names is asked. Raises UsageError for what is no
    URL.
    """
    key, where = find_key(key_file)
    server = HttpServer(url, key)
    health = server.ask("/health")
    if not health.status:
        return asdict(ServerAnswers(url=clean(url), key=where, health=_path(health)))
    # Before the question, whose own request would be counted.
    said = server.ask("/metrics")
    wanted = record(tuple[WantedMetric, ...], list(metrics))
    text = said.body.decode(errors="replace") if said.status == 200 else ""
    listing, models = list_models(server)
    asked = model or (models[0] if models else "")
    token = ask_anyhow(server, asked, _HELLO, _FEW, seconds) if asked else None
    version = server.ask("/version").json
    version = version.get("version") if isinstance(version, dict) else None
    found = ServerAnswers(
        url=clean(url),
        key=where,
        health=_path(health),
        version=server.clean(version, 60) if isinstance(version, str) else "",
        models=models,
        listing=_path(listing),
        asked=asked,
        token=token,
        metrics=_path(said),
        figures=read_figures(text, wanted),
    )
    return asdict(found)


def ask_cluster_server(
    name: str, metrics: Sequence[dict[str, Any]] = (), seconds: float = 30.0
) -> dict[str, Any]:
    """Return the answers of the server that was started last in a cluster, on its head."""
    try:
        url = json.loads((config_folder(name) / "group.json").read_text(encoding="utf-8"))["url"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise HostError(f"group.json does not say where the server is: {error}") from None
    return ask_server(url, metrics=metrics, seconds=seconds)


def _path(answer: HttpAnswer) -> PathAnswer:
    return PathAnswer(status=answer.status, ms=round(answer.ms, 1), trouble=answer.trouble)
