"""Read results of the benchmark, and judge the difference of two series."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from patchkit.errors import UsageError
from patchkit.foreign import positive_number
from patchkit.frozen import Fields, Texts, frozen, positional
from patchkit.reading import read_text
from patchkit.records import RECIPES, RecordError, read_json, read_toml

CONDITIONS = "digest.json"
ENOUGH = 3
"""The least number of repetitions from whose spread a verdict can be drawn."""
_RAW = "raw"
_RESULTS = "name a folder that `patchkit bench MODEL` wrote"

Verdict = Literal["better", "worse", "within the spread", "too few"]


@positional
class Measure:
    """A figure in vLLM's result: its key, its name and unit for people, and what is better.

    A ``main`` figure is shown without -v.
    """

    key: str
    name: str
    unit: str
    better: Literal["more", "less"]
    main: bool


MEASURES = read_toml(tuple[Measure, ...], RECIPES / "bench.toml", key="measure")
MAIN = {measure.name for measure in MEASURES if measure.main}
_MORE = {measure.name for measure in MEASURES if measure.better == "more"}


@frozen
class Series:
    """The values of one figure, one value for each round, and their median."""

    load: str
    values: tuple[float, ...]
    figure: str
    unit: str
    median: float

    @property
    def text(self) -> str:
        """Return ``median (least-most)``, followed by ``!`` if there are too few repetitions."""
        spread = f"{min(self.values):.4g}-{max(self.values):.4g}"
        mark = " !" if len(self.values) < ENOUGH else ""
        return f"{self.median:.4g} ({spread}){mark}"


@frozen
class FigureDifference:
    """Compare two series of one figure: the ratio is the second median divided by the first."""

    first: Series
    second: Series
    ratio: float
    verdict: Verdict

    @property
    def text(self) -> str:
        """Return ``ratio (least-most)``: that of the medians, then the range of rounds' ratios."""
        pairs = zip(self.first.values, self.second.values, strict=False)
        ratios = [after / before for before, after in pairs]
        return f"{self.ratio:.3f} ({min(ratios):.3f}-{max(ratios):.3f})"


def result_file(folder: Path, load: str, number: int) -> Path:
    """Return the path of a round's result; ``number`` counts from 0, file names from 1."""
    return folder / _RAW / load / f"{number + 1}.json"


def result_files(folder: Path) -> list[Path]:
    """Return the result files in a folder, sorted by load and round."""
    places = folder.glob(f"{_RAW}/*/*.json")
    return sorted(places, key=lambda place: (place.parent, int(place.stem)))


def read_series(folder: Path) -> list[Series]:
    """Return the figures in a folder, a series for each load and measure.

    A series leaves out rounds without a positive value. Raises UsageError if there are no results,
    or if a file is no result of the benchmark.
    """
    results: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for place in result_files(folder):
        results[place.parent.name].append(_read_object(place))
    if not results:
        raise UsageError(f"{folder}: holds no results", hint=_RESULTS)

    all_series = []
    for load, rounds in results.items():
        for measure in MEASURES:
            numbers = (positive_number(result.get(measure.key)) for result in rounds)
            if values := tuple(filter(None, numbers)):
                series = Series(
                    load=load,
                    values=values,
                    figure=measure.name,
                    unit=measure.unit,
                    median=statistics.median(values),
                )
                all_series.append(series)
    return all_series


def _read_object(place: Path) -> Fields:
    try:
        return read_json(Fields, read_text(place, hint=_RESULTS))
    except RecordError as error:
        raise UsageError(f"{place}: {error}", hint=_RESULTS) from None


def read_conditions(folder: Path) -> Fields:
    """Return the setup in which a folder's figures were measured.

    Raises UsageError if its file is no JSON object.
    """
    return _read_object(folder / CONDITIONS)


def compare_series(
    first: Sequence[Series],
    second: Sequence[Series],
) -> list[FigureDifference]:
    """Pair the series of two folders that have the same load and figure."""
    partners = {(series.load, series.figure): series for series in second}
    pairs = [(series, partners.get((series.load, series.figure))) for series in first]
    return [
        FigureDifference(
            first=series,
            second=partner,
            ratio=partner.median / series.median,
            verdict=_judge(series, partner),
        )
        for series, partner in pairs
        if partner
    ]


def _judge(first: Series, second: Series) -> Verdict:
    """Return whether the second series is better; a difference counts if no values overlap.

    Two equal servers, with three repetitions each, differ like this by chance in one of ten
    comparisons: in 2 of the 20 orders of six values. The verdict says nothing about the cause.
    """
    before = first.values
    after = second.values
    if min(len(before), len(after)) < ENOUGH:
        return "too few"

    is_more = min(after) > max(before)
    is_less = max(after) < min(before)
    if not is_more and not is_less:
        return "within the spread"
    wants_more = first.figure in _MORE
    return "better" if is_more == wants_more else "worse"


def find_changes(
    before: object,
    after: object,
    at: str = "",
) -> list[Texts]:
    """Return a row for each difference of two setups: path, value before, value after.

    A path is as in ``loads.NAME.depth``, below ``at``; "" stands for a missing value.
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        changes = []
        for key in sorted({*before, *after}):
            place = f"{at}.{key}".lstrip(".")
            changes += find_changes(before.get(key, ""), after.get(key, ""), place)
        return changes

    return [] if before == after else [(at, str(before), str(after))]
