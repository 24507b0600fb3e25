"""Read results of the benchmark, and judge the difference of two series."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from patchkit.errors import UsageError
from patchkit.foreign import positive_number
from patchkit.frozen import frozen
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


@frozen
class Series:
    """The values of one figure by round."""

    variant: str
    load: str
    measure: Measure
    values: tuple[float, ...]

    def fields(self) -> dict[str, object]:
        """Return the fields of its JSON."""
        return {
            "variant": self.variant,
            "load": self.load,
            "values": self.values,
            "figure": self.measure.name,
            "unit": self.measure.unit,
            "median": self.median,
        }

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def text(self) -> str:
        """Return ``median (least-most)``, with ``!`` behind too few repetitions."""
        spread = f"{min(self.values):.4g}-{max(self.values):.4g}"
        mark = " !" if len(self.values) < ENOUGH else ""
        return f"{self.median:.4g} ({spread}){mark}"


@frozen
class FigureDifference:
    """Two series of one figure."""

    first: Series
    second: Series

    def fields(self) -> dict[str, object]:
        """Return the fields of its JSON."""
        return {
            "first": self.first,
            "second": self.second,
            "ratio": self.ratio,
            "verdict": self.verdict,
        }

    @property
    def ratio(self) -> float:
        """Return the ratio of the medians."""
        return self.second.median / self.first.median

    @property
    def verdict(self) -> Verdict:
        """Return the claim: a difference only where no value of one series reaches the other's.

        With three repetitions of each that happens by chance in one of ten comparisons of equals:
        2 of the 20 orders of six values. It says nothing about why.
        """
        before = self.first.values
        after = self.second.values
        if min(len(before), len(after)) < ENOUGH:
            return "too few"

        is_more = min(after) > max(before)
        is_less = max(after) < min(before)
        if not is_more and not is_less:
            return "within the spread"
        wants_more = self.first.measure.better == "more"
        return "better" if is_more == wants_more else "worse"

    @property
    def text(self) -> str:
        """Return ``ratio (least-most)``, of the second by the first, round by round."""
        pairs = zip(self.first.values, self.second.values, strict=False)
        ratios = [after / before for before, after in pairs]
        return f"{self.ratio:.3f} ({min(ratios):.3f}-{max(ratios):.3f})"


def result_file(folder: Path, variant: str, load: str, number: int) -> Path:
    """Return where the result of a round lies."""
    return folder / _RAW / variant / load / f"{number + 1}.json"


def result_files(folder: Path) -> list[Path]:
    """Return the results in a folder, those of a variant and load in the order of rounds."""
    places = folder.glob(f"{_RAW}/*/*/*.json")
    return sorted(places, key=lambda place: (place.parent, int(place.stem)))


def read_series(folder: Path) -> list[Series]:
    """Return the figures of a folder, by variant and load. Raises UsageError."""
    results: defaultdict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for place in result_files(folder):
        variant, load = place.parts[-3:-1]
        results[variant, load].append(_read_result(place))
    if not results:
        raise UsageError(
            f"{folder}: holds no results",
            hint="a folder that `patchkit bench MODEL` wrote",
        )

    all_series = []
    for (variant, load), rounds in results.items():
        for measure in MEASURES:
            values = tuple(_values(measure, rounds))
            if values:
                all_series.append(
                    Series(variant=variant, load=load, measure=measure, values=values)
                )
    return all_series


def _read_result(place: Path) -> dict[str, Any]:
    try:
        return read_json(dict[str, Any], read_text(place))
    except RecordError as error:
        raise UsageError(
            f"{place}: is no result of vLLM's benchmark: {error}"
        ) from None


def _values(measure: Measure, rounds: Iterable[Mapping[str, Any]]) -> Iterator[float]:
    """Yield a figure by round; rounds that do not have it are left out."""
    for result in rounds:
        value = positive_number(result.get(measure.key))
        if value:
            yield value


def read_conditions(folder: Path) -> dict[str, Any]:
    """Return the setup that a folder's figures are of. Raises UsageError if it has none."""
    place = folder / CONDITIONS
    try:
        return read_json(dict[str, Any], read_text(place))
    except RecordError as error:
        raise UsageError(
            f"{place}: {error}", hint="measure anew, into a new folder"
        ) from None


def compare_series(
    first: Sequence[Series],
    second: Sequence[Series],
) -> list[FigureDifference]:
    """Return the pairs of one load and figure: of variants of one name, or of the only ones."""
    has_one_each = all(
        len({series.variant for series in folder}) == 1 for folder in (first, second)
    )

    def key(series: Series) -> tuple[str, str, Measure]:
        name = "" if has_one_each else series.variant
        return name, series.load, series.measure

    partners = {key(series): series for series in second}
    return [
        FigureDifference(first=series, second=partners[key(series)])
        for series in first
        if key(series) in partners
    ]


def find_changes(
    before: object,
    after: object,
    at: str = "",
) -> list[tuple[str, str, str]]:
    """Return where two setups differ: the path, and both values as texts, "" for none."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        changes = []
        for key in sorted({*before, *after}):
            place = f"{at}.{key}".lstrip(".")
            changes += find_changes(before.get(key), after.get(key), place)
        return changes

    if before == after:
        return []
    return [(at, _value_text(before), _value_text(after))]


def _value_text(value: object) -> str:
    return "" if value is None else str(value)
