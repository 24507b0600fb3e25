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
_WORD = 60  # characters of a label's value


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedMetric:
    """A figure: its names, one for each group of releases; the sum of its series, or ``max``.

    ``where`` are labels that a series has to have. ``label`` is for what is said by a label alone:
    its value is the figure then.
    """

    id: str
    names: tuple[str, ...]
    fold: str = "sum"
    where: Mapping[str, str] = field(default_factory=dict)
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was found, by the ids that were asked for: numbers, and values of labels."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)


def figures(text: str, wanted: Sequence[WantedMetric]) -> Figures:
    """Return what a text has of the figures; a figure that it does not have is left out."""
    names = {name for metric in wanted for name in metric.names}
    series: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        if len(line) < _LONGEST and (match := _LINE.fullmatch(line)) and match["name"] in names:
            labels = dict(_LABEL.findall(match["labels"] or ""))
            value = math.nan
            with contextlib.suppress(ValueError):
                value = float(match["value"])
            series.setdefault(match["name"], []).append((labels, value))
    numbers: dict[str, float] = {}
    words: dict[str, str] = {}
    for metric in wanted:
        name = next((name for name in metric.names if name in series), "")
        found = [one for one in series.get(name, ()) if metric.where.items() <= one[0].items()]
        values = [value for _, value in found if math.isfinite(value)]
        if metric.label:
            said = [one[metric.label] for one, _ in found if metric.label in one]
            if said:
                words[metric.id] = said[0][:_WORD]
        elif values:
            numbers[metric.id] = max(values) if metric.fold == "max" else sum(values)
        elif name and metric.where:
            numbers[metric.id] = 0.0  # a counter has no series before the first event of its kind
    return Figures(numbers=numbers, words=words)
