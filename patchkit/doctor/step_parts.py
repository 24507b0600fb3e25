"""Divide the time of a decoding step into parts, and name the part at fault. Pure."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import field

from patchkit.finding import fill_texts
from patchkit.frozen import Texts, frozen
from patchkit.records import RECIPES, read_toml

_BENCH = RECIPES / "bench.toml"
_SIGNS = {"<": operator.lt, ">": operator.gt}
_GROUPS = 2  # all-reduces of a layer: behind attention, and behind the MLP

Quantity = float | str | None
"""A number, a text, or None if it is unknown: no condition holds for that."""


@frozen
class StepMeasurements:
    """What was measured of a server under a load, and read about it.

    ``step_ms`` is the time from one decoding step to the next, ``tokens`` what a step gives to all
    requests together, ``requests`` the number of requests that run, ``waiting`` of those that wait.
    ``read_bytes`` are what a rank reads from memory for a step, ``bandwidth`` GB/s. ``kernel_ms``
    is the time that the kernels of a step take beyond that. ``all_reduce_us`` is one all-reduce of
    this model's size. ``idle`` is the part of the time in which the GPU runs no kernel, ``delay``
    that in which a process of the engine waits for a core. ``sources`` say how each is known.
    ``facts`` are quantities for the conditions of bench.toml, and words for its texts.
    """

    step_ms: float
    tokens: float
    requests: float
    waiting: float = 0.0
    read_bytes: float | None = None
    bandwidth: float | None = None
    kernel_ms: float | None = None
    layers: int = 0
    ranks: int = 1
    all_reduce_us: float | None = None
    idle: float | None = None
    delay: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Quantity] = field(default_factory=dict)


@frozen
class StepPart:
    """A part of a step in ms, None if unknown; ``source`` says how it is known, or why not."""

    name: str
    ms: float | None
    source: str


@frozen
class StepParts:
    """A step in parts. ``rest_ms`` is what no part explains, below 0 if the parts are too long.

    ``fault`` is the id of the part at fault, "" for none, and "unknown" if much is unexplained.
    """

    measured: StepMeasurements
    parts: tuple[StepPart, ...]
    rest_ms: float
    fault: str
    verdict: str
    lever: str


@frozen
class SpeedFault:
    """A row of bench.toml: a fault, the quantities that show it, and what is said of it."""

    id: str
    when: Mapping[str, str]
    what: str
    hint: str


@frozen
class PartText:
    """The name of a part for people."""

    id: str
    name: str


_FAULTS = read_toml(tuple[SpeedFault, ...], _BENCH, key="fault")
_PARTS = read_toml(tuple[PartText, ...], _BENCH, key="part")


def explain_step(measured: StepMeasurements) -> StepParts:
    """Return the parts of a step, the one at fault, and the lever."""
    times = _part_times(measured)
    missing = "not measured"
    parts = tuple(
        StepPart(
            name=part.name,
            ms=times[part.id],
            source=measured.sources.get(part.id, missing),
        )
        for part in _PARTS
    )
    rest = measured.step_ms - sum(filter(None, times.values()))

    quantities = {**_quantities(measured, times, rest), **measured.facts}
    fault = next(row for row in _FAULTS if _holds(row.when, quantities))
    texts = fill_texts({"what": fault.what, "hint": fault.hint}, _shown(quantities))
    return StepParts(
        measured=measured,
        parts=parts,
        rest_ms=rest,
        fault=fault.id,
        verdict=texts["what"],
        lever=texts["hint"],
    )


def _part_times(measured: StepMeasurements) -> dict[str, float | None]:
    memory = None
    if measured.read_bytes and measured.bandwidth:
        memory = measured.read_bytes / measured.bandwidth / 1e6

    reduce = 0.0 if measured.ranks == 1 else None
    if reduce is None and measured.all_reduce_us is not None:
        reduce = _GROUPS * measured.layers * measured.all_reduce_us / 1000

    # A GPU that waits for a delayed engine is idle: the delay is a part of that time.
    shares = [share for share in (measured.idle, measured.delay) if share is not None]
    host = max(shares) * measured.step_ms if shares else None
    return {
        "memory": memory,
        "kernels": measured.kernel_ms,
        "all-reduce": reduce,
        "host": host,
    }


def _quantities(
    measured: StepMeasurements, times: Mapping[str, float | None], rest: float
) -> dict[str, Quantity]:
    """Return the quantities that conditions may name; shares are parts of the step."""
    reduce = times["all-reduce"]
    return {
        "requests": measured.requests,
        "waiting": measured.waiting,
        "ranks": float(measured.ranks),
        "all_reduce_ms": reduce,
        "all_reduce_share": None if reduce is None else reduce / measured.step_ms,
        "host_ms": times["host"],
        "delay": measured.delay,
        "delay_ms": (measured.delay or 0.0) * measured.step_ms,
        "rest_ms": rest,
        "rest_share": rest / measured.step_ms,
    }


def _holds(when: Mapping[str, str], quantities: Mapping[str, Quantity]) -> bool:
    """Return whether all conditions hold: ``<N``, ``>N``, or else a text that is equal."""
    for name, condition in when.items():
        value = quantities.get(name)
        compare = _SIGNS.get(condition[0])
        if compare is None:
            is_met = value == condition
        else:
            is_met = isinstance(value, float) and compare(value, float(condition[1:]))
        if not is_met:
            return False
    return True


def _shown(quantities: Mapping[str, Quantity]) -> Mapping[str, str]:
    texts = {
        name: f"{value:.3g}" if isinstance(value, float) else value
        for name, value in quantities.items()
        if value is not None
    }
    return defaultdict(lambda: "unknown", texts)


def step_lines(explained: StepParts) -> Texts:
    """Return the lines for people: the step, its parts with how they are known, the verdict."""
    measured = explained.measured
    speed = measured.tokens / measured.step_ms * 1000
    head = (
        f"a step takes {measured.step_ms:.3g} ms with {measured.requests:.3g} requests, and "
        f"gives {measured.tokens:.3g} tokens: {speed:.4g} tok/s"
    )
    lines = [head]
    for part in explained.parts:
        time = "     ?" if part.ms is None else f"{part.ms:6.2f}"
        lines.append(f"  {time} ms  {part.name}: {part.source}")
    lines.append(f"  {explained.rest_ms:6.2f} ms  not explained")
    lines.append(
        f"at fault: {explained.verdict}" if explained.fault else explained.verdict
    )
    if explained.lever:
        lines.append(f"next: {explained.lever}")
    return tuple(lines)
