"""Read figures from what a server says of itself for Prometheus; which ones is the asker's."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
