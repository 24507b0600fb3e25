"""Draw what was measured: throughput against latency, prefill and decode by load."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from patchkit.measure.bench.results import BENCHY, MEASURES, Measure, Series, series

_OUTPUT, _TPOT = MEASURES[0], MEASURES[4]
# By the requests at once.
_CURVES = {"prefill": MEASURES[6], "decode": MEASURES[7], "pp": BENCHY[0], "tg": BENCHY[1]}
# Between dark and light, so that they are seen on both; the marks tell curves without colour.
_COLOURS = ("#2f81c7", "#d9822b", "#2a9d6a", "#b04bb0", "#c4473a", "#7a7f87")
_MARKS = ("o", "s", "^", "D", "v", "x")
_GREY = "#808080"
_SIZE = (7.0, 4.2)  # inches


def plot(folder: Path) -> None:
    """Write the plots of a folder as SVG and PNG, if matplotlib is there.

    vLLM's extra ``bench`` brings it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return
    found = series(folder)
    known = {each.measure for each in found}
    if _OUTPUT in known:
        _draw(folder, "throughput-latency", lambda axes: _frontier(axes, found))
    for name, measure in _CURVES.items():
        if measure in known:
            _draw(folder, name, partial(_by_concurrency, found=found, measure=measure))


def _draw(folder: Path, name: str, draw: Callable[[Any], None]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    # Text stays text in SVG; ids by a fixed salt, so that the same figures make the same file.
    style = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), _GREY)
    style |= dict.fromkeys(("xtick.color", "ytick.color"), _GREY)
    with mpl.rc_context(style):
        figure, axes = pyplot.subplots(figsize=_SIZE, layout="constrained")
        draw(axes)
        axes.grid(visible=True, color=_GREY, alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, labelcolor=_GREY)
        place = folder / "plots" / name
        place.parent.mkdir(exist_ok=True)
        for kind in ("svg", "png"):
            figure.savefig(
                place.with_suffix(f".{kind}"),
                transparent=True,
                dpi=150,
                metadata={"Date": None, "Creator": None} if kind == "svg" else None,
            )
        pyplot.close(figure)


def _curves(found: Sequence[Series], measure: Measure) -> dict[str, list[Series]]:
    """Return a figure by curve: the variant, and the prompt's length where there are several."""
    many = len({each.depth for each in found}) > 1
    curves: dict[str, list[Series]] = {}
    for each in found:
        if each.measure == measure:
            name = f"{each.variant}, {each.depth} tokens" if many else each.variant
            curves.setdefault(name, []).append(each)
    return {
        name: sorted(each, key=lambda one: one.concurrency) for name, each in sorted(curves.items())
    }


def _bars(
    axes: Any, number: int, name: str, across: Sequence[float], many: Sequence[Series]
) -> None:
    low = [each.median - min(each.values) for each in many]
    high = [max(each.values) - each.median for each in many]
    axes.errorbar(
        across,
        [each.median for each in many],
        yerr=[low, high],
        label=name,
        color=_COLOURS[number % len(_COLOURS)],
        marker=_MARKS[number % len(_MARKS)],
        capsize=3,
    )


def _by_concurrency(axes: Any, found: Sequence[Series], measure: Measure) -> None:
    for number, (name, many) in enumerate(_curves(found, measure).items()):
        _bars(axes, number, name, [each.concurrency for each in many], many)
    axes.set_xscale("log", base=2)
    ticks = sorted({each.concurrency for each in found})
    axes.set_xticks(ticks, [str(each) for each in ticks])
    axes.minorticks_off()
    axes.set_xlabel("requests at once")
    axes.set_ylabel(f"{measure.name}, {measure.unit}")


def _frontier(axes: Any, found: Sequence[Series]) -> None:
    latency = {(e.variant, e.load): e for e in found if e.measure == _TPOT}
    for number, (name, many) in enumerate(_curves(found, _OUTPUT).items()):
        known = [each for each in many if (each.variant, each.load) in latency]
        _bars(axes, number, name, [latency[e.variant, e.load].median for e in known], known)
    axes.set_xlabel(f"{_TPOT.name}, {_TPOT.unit}")
    axes.set_ylabel(f"{_OUTPUT.name}, {_OUTPUT.unit}")
