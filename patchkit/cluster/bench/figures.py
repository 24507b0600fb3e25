"""Read what was measured, and say what a difference of two series is worth."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from patchkit.errors import UsageError
from patchkit.foreign import positive_number
from patchkit.reading import read_text
from patchkit.records import RecordError, read_json

CONDITIONS = "digest.json"
ENOUGH = 3
"""Repetitions from which on a spread says something."""
_RAW = "raw"

Verdict = Literal["better", "worse", "within the spread", "too few"]


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of vLLM's result: its key there, its name, its unit, and which end is better."""

    key: str
    name: str
    unit: str
    better: Literal["more", "less"]


MEASURES = (
    Measure("output_throughput", "output", "tok/s", "more"),
    Measure("total_token_throughput", "all tokens", "tok/s", "more"),
    Measure("median_ttft_ms", "first token, median", "ms", "less"),
    Measure("p99_ttft_ms", "first token, p99", "ms", "less"),
    Measure("median_tpot_ms", "each further token, median", "ms", "less"),
    Measure("p99_itl_ms", "between tokens, p99", "ms", "less"),
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

    def fields(self) -> dict[str, object]:
        """Return it as JSON has it."""
        own = {"variant": self.variant, "load": self.load, "values": self.values}
        figure = {"figure": self.measure.name, "unit": self.measure.unit}
        return {**own, **figure, "median": self.median}

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
    """Two series of one figure."""

    first: Series
    second: Series

    def fields(self) -> dict[str, object]:
        """Return it as JSON has it."""
        return {
            name: getattr(self, name)
            for name in ("first", "second", "ratio", "verdict")
        }

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
        """Return ``ratio (least-most)``, of the second by the first, round by round."""
        pairs = zip(self.first.values, self.second.values, strict=False)
        ratios = [second / first for first, second in pairs]
        return f"{self.ratio:.3f} ({min(ratios):.3f}-{max(ratios):.3f})"


def result_file(folder: Path, variant: str, load: str, number: int) -> Path:
    """Return where the result of a round lies."""
    return folder / _RAW / variant / load / f"{number + 1}.json"


def read_series(folder: Path) -> list[Series]:
    """Return the figures of a folder, by variant and load. Raises UsageError."""
    results: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    places = folder.glob(f"{_RAW}/*/*/*.json")
    for place in sorted(places, key=lambda place: (place.parent, int(place.stem))):
        try:
            result = read_json(dict[str, Any], read_text(place))
        except RecordError as error:
            raise UsageError(
                f"{place}: is no result of vLLM's benchmark: {error}"
            ) from None
        results.setdefault((place.parent.parent.name, place.parent.name), []).append(
            result
        )
    if not results:
        hint = "a folder that `patchkit bench MODEL` wrote"
        raise UsageError(f"{folder}: holds no results", hint=hint)
    found = []
    for (variant, load), rounds in results.items():
        for measure in MEASURES:
            figures = (positive_number(result.get(measure.key)) for result in rounds)
            values = tuple(figure for figure in figures if figure)
            if values:
                found.append(
                    Series(variant=variant, load=load, measure=measure, values=values)
                )
    return found


def read_conditions(folder: Path) -> dict[str, Any]:
    """Return what makes the figures of a folder. Raises UsageError if it does not say."""
    place = folder / CONDITIONS
    try:
        return read_json(dict[str, Any], read_text(place))
    except RecordError as error:
        raise UsageError(
            f"{place}: {error}", hint="measure anew, into a new folder"
        ) from None


def compare_series(
    first: Sequence[Series], second: Sequence[Series]
) -> list[FigureDifference]:
    """Return the pairs of one load and figure: of variants of one name, or of the only ones."""
    alone = all(
        len({series.variant for series in many}) == 1 for many in (first, second)
    )
    ours, theirs = (
        [(("" if alone else its.variant, its.load, its.measure), its) for its in many]
        for many in (first, second)
    )
    others = dict(theirs)
    return [
        FigureDifference(first=its, second=others[key])
        for key, its in ours
        if key in others
    ]


def find_changes(first: Any, second: Any, at: str = "") -> list[tuple[str, str, str]]:
    """Return where two setups differ: the path, and both values as texts, "" for none."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return [
            change
            for key in sorted({*first, *second})
            for change in find_changes(
                first.get(key), second.get(key), f"{at}.{key}".lstrip(".")
            )
        ]
    if first == second:
        return []
    return [
        (at, "" if first is None else str(first), "" if second is None else str(second))
    ]
