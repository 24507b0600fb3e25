"""Read the figures of a server's metrics for Prometheus. Runs on the head."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field

from patchkit.foreign import read_count
from patchkit.frozen import frozen
from patchkit.records import RECIPES, read_toml

_LINE = re.compile(
    r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)(?: \d+)?"
)
_LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')
_LONGEST = 1 << 16  # characters of a line
_Series = tuple[Mapping[str, str], float]  # labels, and a figure


@frozen
class WantedMetric:
    """A figure to read. ``names`` are its names in the metrics of different releases.

    ``fold`` says how its series become one figure: "sum" or "max". ``where`` are the labels that a
    series needs in order to count.
    """

    id: str
    names: tuple[str, ...]
    fold: str = "sum"
    where: Mapping[str, str] = field(default_factory=dict)


def wanted_metrics() -> tuple[WantedMetric, ...]:
    """Load the metrics of ``server.toml``."""
    file = RECIPES / "doctor" / "server.toml"
    return read_toml(tuple[WantedMetric, ...], file, key="metric")


def read_figures(text: str, wanted: Sequence[WantedMetric]) -> dict[str, float]:
    """Return the wanted figures by id. A figure that the text of /metrics lacks is left out."""
    names = {name for metric in wanted for name in metric.names}
    series = _read_series(text, names)

    figures: dict[str, float] = {}
    for metric in wanted:
        present = [name for name in metric.names if name in series]
        if present:
            values = _values_of(metric, series[present[0]])
            figure = _fold(metric, values)
            if figure is not None:
                figures[metric.id] = figure
    return figures


def _values_of(metric: WantedMetric, series: Sequence[_Series]) -> list[float]:
    """Return the values of the series that have all labels in ``metric.where``."""
    labels = metric.where.items()
    return [value for present, value in series if labels <= present.items()]


def _fold(metric: WantedMetric, values: Sequence[float]) -> float | None:
    if values:
        return max(values) if metric.fold == "max" else sum(values)
    # A counter has no series for a label before the first such event: its value is 0.
    return 0.0 if metric.where else None


def _read_series(text: str, names: Collection[str]) -> dict[str, list[_Series]]:
    """Return the series with these names, by name.

    Left out are series with a value that is negative or not finite, and overlong lines.
    """
    series: defaultdict[str, list[_Series]] = defaultdict(list)
    for line in text.splitlines():
        if len(line) >= _LONGEST:
            continue
        match = _LINE.fullmatch(line)
        if match is None or match["name"] not in names:
            continue

        with contextlib.suppress(ValueError):
            value = read_count(match["value"])
            labels = dict(_LABEL.findall(match["labels"] or ""))
            series[match["name"]].append((labels, value))
    return series
