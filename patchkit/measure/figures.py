"""Read what was measured, and say what a difference of two series is worth."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from patchkit.errors import UsageError
from patchkit.reading import read_text
from patchkit.records import RecordError, read_json

CONDITIONS = "digest.json"
ENOUGH = 3
"""Repetitions from which on a spread says something."""
_RAW = "raw"

Verdict = Literal["better", "worse", "within the spread", "too few"]


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of vLLM's result: its key there, what it is called, its unit, which end is better.

    ``per`` is what the figure is divided into: tokens of the prompt, or one token.
    """

    key: str
    name: str
    unit: str
    better: Literal["more", "less"]
    per: Literal["", "depth", "token"] = ""

    def value_of(self, result: Mapping[str, Any], depth: int) -> float | None:
        """Return the figure of a result, None if it has none."""
        found = result.get(self.key)
        if not isinstance(found, int | float) or found <= 0:
            return None
        if self.per:
            return (depth if self.per == "depth" else 1) * 1000 / found
        return float(found)


MEASURES = (
    Measure("output_throughput", "output", "tok/s", "more"),
    Measure("total_token_throughput", "all tokens", "tok/s", "more"),
    Measure("median_ttft_ms", "first token, median", "ms", "less"),
    Measure("p99_ttft_ms", "first token, p99", "ms", "less"),
    Measure("median_tpot_ms", "each further token, median", "ms", "less"),
    Measure("p99_itl_ms", "between tokens, p99", "ms", "less"),
    Measure("median_ttft_ms", "prefill of a request", "tok/s", "more", per="depth"),
    Measure("median_tpot_ms", "decode of a request", "tok/s", "more", per="token"),
)
"""Figures by the keys of `vllm bench serve` (vllm/benchmarks/serve.py, 0.11.1 to 0.33.0)."""
MAIN = (MEASURES[0], MEASURES[2], MEASURES[4])


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The values of one figure by round."""

    variant: str
    load: str
    measure: Measure
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def text(self) -> str:
        """Return ``median (least-most)``, with ``!`` behind too few repetitions."""
        least, most = f"{min(self.values):.4g}", f"{max(self.values):.4g}"
        few = " !" if len(self.values) < ENOUGH else ""
        return f"{self.median:.4g} ({least}-{most}){few}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureDifference:
    """Two series of one figure; ``ratios`` are the second by the first, round by round."""

    first: Series
    second: Series

    @property
    def ratios(self) -> tuple[float, ...]:
        pairs = zip(self.first.values, self.second.values, strict=False)
        return tuple(second / first for first, second in pairs)

    @property
    def ratio(self) -> float:
        """Return the ratio of the medians."""
        return self.second.median / self.first.median

    @property
    def verdict(self) -> Verdict:
        """Return what may be claimed: a difference only where no value of one reaches the other's.

        With three repetitions of each that happens by chance in one of ten comparisons of equals:
        2 of the 20 orders of six values. It says nothing about why.
        """
        if min(len(self.first.values), len(self.second.values)) < ENOUGH:
            return "too few"
        apart = max(self.first.values) < min(self.second.values)
        if not apart and not max(self.second.values) < min(self.first.values):
            return "within the spread"
        return "better" if apart == (self.first.measure.better == "more") else "worse"

    @property
    def text(self) -> str:
        """Return ``ratio (least-most)``."""
        least, most = min(self.ratios), max(self.ratios)
        return f"{self.ratio:.3f} ({least:.3f}-{most:.3f})"


def result_file(folder: Path, variant: str, load: str, number: int) -> Path:
    """Return where the result of a round lies."""
    return folder / _RAW / variant / load / f"{number + 1}.json"


def read_series(folder: Path, measures: Sequence[Measure] = MEASURES) -> list[Series]:
    """Return the figures of a folder, by variant and load. Raises UsageError."""
    results: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    places = folder.glob(f"{_RAW}/*/*/*.json")
    for place in sorted(places, key=lambda place: (place.parent, int(place.stem))):
        try:
            result = read_json(dict[str, Any], read_text(place))
        except RecordError as error:
            raise UsageError(f"{place}: is no result of vLLM's benchmark: {error}") from None
        results.setdefault((place.parent.parent.name, place.parent.name), []).append(result)
    if not results:
        raise UsageError(
            f"{folder}: holds no results", hint="a folder that `patchkit bench MODEL` wrote"
        )
    found = []
    for (variant, load), rounds in results.items():
        depth = int(load.partition("-")[0].removeprefix("in"))
        for measure in measures:
            values = [measure.value_of(result, depth) for result in rounds]
            if known := tuple(value for value in values if value is not None):
                found.append(Series(variant=variant, load=load, measure=measure, values=known))
    return found


def read_conditions(folder: Path) -> dict[str, Any]:
    """Return what makes the figures of a folder. Raises UsageError if it does not say."""
    place = folder / CONDITIONS
    try:
        return read_json(dict[str, Any], read_text(place))
    except RecordError as error:
        raise UsageError(f"{place}: {error}", hint="measure anew, into a new folder") from None


def compare_variants(found: Sequence[Series], first: str, second: str) -> list[FigureDifference]:
    """Return the pairs of two variants in one folder."""
    left, right = ([each for each in found if each.variant == name] for name in (first, second))
    return _pair_figures(left, right)


def compare_folders(first: Sequence[Series], second: Sequence[Series]) -> list[FigureDifference]:
    """Return the pairs of two folders: of variants of one name, or of the only one of each."""
    names, others = ({each.variant: None for each in many} for many in (first, second))
    if len(names) == len(others) == 1:
        return _pair_figures(first, second)
    return [
        pair
        for name in names
        for pair in _pair_figures(
            [each for each in first if each.variant == name],
            [each for each in second if each.variant == name],
        )
    ]


def _pair_figures(first: Sequence[Series], second: Sequence[Series]) -> list[FigureDifference]:
    others = {(series.load, series.measure): series for series in second}
    return [
        FigureDifference(first=series, second=others[series.load, series.measure])
        for series in first
        if (series.load, series.measure) in others
    ]


def find_changes(first: Any, second: Any, at: str = "") -> list[tuple[str, str, str]]:
    """Return where two setups differ: the path, and both values as texts, "" for none."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return [
            change
            for key in sorted({*first, *second})
            for change in find_changes(first.get(key), second.get(key), f"{at}.{key}".lstrip("."))
        ]
    if first == second:
        return []
    return [(at, "" if first is None else str(first), "" if second is None else str(second))]
