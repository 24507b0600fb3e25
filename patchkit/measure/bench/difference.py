"""Say what a difference between two series is worth: whether it is larger than their own spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from patchkit.measure.bench.results import ENOUGH, Series

Verdict = Literal["better", "worse", "within the spread", "too few"]


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


def differences(first: Sequence[Series], second: Sequence[Series]) -> list[FigureDifference]:
    """Return the pairs of the same figure and load, in the order of the first."""
    others = {(each.load, each.measure): each for each in second}
    return [
        FigureDifference(first=each, second=others[each.load, each.measure])
        for each in first
        if (each.load, each.measure) in others
    ]


def between(first: Sequence[Series], second: Sequence[Series]) -> list[FigureDifference]:
    """Return the pairs of two folders: of variants of one name, or of the only one of each."""
    names = [list(dict.fromkeys(each.variant for each in many)) for many in (first, second)]
    both = [(name, name) for name in names[0] if name in names[1]]
    if len(names[0]) == len(names[1]) == 1:
        both = [(names[0][0], names[1][0])]
    return [
        pair
        for left, right in both
        for pair in differences(
            [each for each in first if each.variant == left],
            [each for each in second if each.variant == right],
        )
    ]


def changed(first: Any, second: Any, at: str = "") -> list[tuple[str, str, str]]:
    """Return where two digests differ: the path, and both values as texts, "" for none."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return [
            each
            for key in sorted({*first, *second})
            for each in changed(first.get(key), second.get(key), f"{at}.{key}".lstrip("."))
        ]
    if first == second:
        return []
    return [(at, "" if first is None else str(first), "" if second is None else str(second))]
