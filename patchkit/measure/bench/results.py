"""Read what was measured: the figures of every variant and load, with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from patchkit.errors import UsageError
from patchkit.reading import read_text
from patchkit.records import RecordError, read_json

RAW, DIGEST = "raw", "digest.json"
ENOUGH = 3
"""Repetitions from which on a spread says something."""


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

    def value(self, result: Mapping[str, Any], depth: int) -> float | None:
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

BENCHY = (
    Measure("pp_throughput", "pp", "tok/s", "more"),
    Measure("tg_throughput", "tg", "tok/s", "more"),
    Measure("peak_throughput", "tg, peak", "tok/s", "more"),
    Measure("ttfr", "ttfr", "ms", "less"),
    Measure("est_ppt", "est_ppt", "ms", "less"),
    Measure("e2e_ttft", "e2e_ttft", "ms", "less"),
)
"""Figures by the keys, and under the names, of llama-benchy 0.4 (its results.py)."""

MAIN = (MEASURES[0], MEASURES[2], MEASURES[4], BENCHY[0], BENCHY[1], BENCHY[5])


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The values of one figure by round."""

    variant: str
    load: str
    depth: int
    concurrency: int
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


def place_of(folder: Path, variant: str, load: str, number: int) -> Path:
    """Return where the result of a round lies."""
    return folder / RAW / variant / load / f"{number + 1}.json"


def results(folder: Path) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """Return the results by variant and load, in the order of rounds. Raises UsageError."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    places = sorted(
        folder.glob(f"{RAW}/*/*/*.json"), key=lambda each: (each.parent, int(each.stem))
    )
    for place in places:
        try:
            result = read_json(dict[str, Any], read_text(place))
        except RecordError as error:
            raise UsageError(f"{place}: is no result of vLLM's benchmark: {error}") from None
        key = (place.parent.parent.name, place.parent.name)
        found.setdefault(key, []).append(_flat(result))
    if not found:
        raise UsageError(
            f"{folder}: holds no results", hint="a folder that `patchkit bench MODEL` wrote"
        )
    return found


def _flat(result: dict[str, Any]) -> Mapping[str, Any]:
    """Return the figures of a result by their keys; llama-benchy's are means of its runs."""
    many = result.get("benchmarks")
    if not isinstance(many, list) or len(many) != 1 or not isinstance(many[0], dict):
        return result
    return {key: each.get("mean") for key, each in many[0].items() if isinstance(each, dict)}


def digest_of(folder: Path) -> dict[str, Any]:
    """Return what makes the figures of a folder. Raises UsageError if it has no digest."""
    try:
        return read_json(dict[str, Any], read_text(folder / DIGEST))
    except RecordError as error:
        raise UsageError(
            f"{folder / DIGEST}: {error}", hint="measure anew, into a new folder"
        ) from None


def series(folder: Path, measures: Sequence[Measure] = (*MEASURES, *BENCHY)) -> list[Series]:
    """Return all figures of a folder, by variant and load as they are named. Raises UsageError."""
    return [
        each
        for (variant, load), many in results(folder).items()
        for each in _of(variant, load, many, measures)
    ]


def _of(
    variant: str, load: str, many: Sequence[Mapping[str, Any]], measures: Sequence[Measure]
) -> Iterator[Series]:
    depth, _, concurrency = (int(part.lstrip("inoutc")) for part in load.split("-"))
    for measure in measures:
        values = [measure.value(result, depth) for result in many]
        known = tuple(each for each in values if each is not None)
        if known:
            yield Series(
                variant=variant,
                load=load,
                depth=depth,
                concurrency=concurrency,
                measure=measure,
                values=known,
            )
