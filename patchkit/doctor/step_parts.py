"""Divide the time of a decoding step into parts, and name the fault that slows it. Pure."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from patchkit.frozen import Texts, Values, frozen
from patchkit.records import RECIPES, read_toml

_BENCH = RECIPES / "bench.toml"

Quantities = Mapping[str, Any]
"""What was measured of a server and read about it, by the names that bench.toml explains.

Numbers and texts; None is unknown.
"""


@frozen
class StepPart:
    """A part of a step; its time is the product of ``factors``, which are names of quantities.

    ``source`` says how it is known, or why not; ``ms`` is None if a factor is unknown.
    """

    id: str
    name: str
    factors: Texts
    source: str
    ms: float | None = None


@frozen
class SpeedFault:
    """A fault, the quantities that show it, what is said of it, and the lever.

    ``id`` is "none" if nothing is slow, and "unknown" if much of a step is unexplained.
    """

    id: str
    when: Values
    what: str
    hint: str


@frozen
class StepParts:
    """A step in parts, of which the last is the rest that no other explains.

    The rest is below 0 if the others are too long.
    """

    measured: Quantities
    parts: tuple[StepPart, ...]
    fault: SpeedFault


_FAULTS = read_toml(tuple[SpeedFault, ...], _BENCH, key="fault")
_PARTS = read_toml(tuple[StepPart, ...], _BENCH, key="part")


def explain_step(measured: Quantities) -> StepParts:
    """Return a step's parts, and the first fault whose conditions hold; ``step_ms`` is required."""
    step_ms = measured["step_ms"]
    texts = _shown(measured)
    # "rest" shrinks by each part; what is left is the last part's only factor.
    quantities = {**measured, "rest": step_ms}
    parts = []
    for part in _PARTS:
        factors: list[Any] = [quantities.get(name) for name in part.factors]
        ms = None if None in factors else math.prod(factors)
        quantities[f"{part.id}_ms"] = ms
        quantities[f"{part.id}_share"] = None if ms is None else ms / step_ms
        quantities["rest"] -= ms or 0.0
        source = part.source.format_map(texts)
        parts.append(replace(part, ms=ms, source=source))

    # The last row has no conditions, so one is always found.
    fault = next(
        row
        for row in _FAULTS
        if all(
            _holds(condition, quantities.get(name))
            for name, condition in row.when.items()
        )
    )
    shown = _shown(quantities)
    what = fault.what.format_map(shown)
    hint = fault.hint.format_map(shown)
    return StepParts(
        measured=measured,
        parts=tuple(parts),
        fault=replace(fault, what=what, hint=hint),
    )


def _holds(condition: str, value: float | str | None) -> bool:
    """Return whether a number is ``<N`` or ``>N``, or a pattern matches the whole of a text."""
    if isinstance(value, float):
        bound = float(condition[1:])
        return value < bound if condition[0] == "<" else value > bound
    return re.fullmatch(condition, value or "") is not None


def _shown(quantities: Quantities) -> Values:
    texts = {
        name: f"{value:.3g}" if isinstance(value, float) else value
        for name, value in quantities.items()
        if value is not None
    }
    return defaultdict(lambda: "unknown", texts)


def step_lines(explained: StepParts) -> Texts:
    """Return the lines for people: the step, its parts with how they are known, the verdict."""
    shown = _shown(explained.measured)
    lines = [
        "a step takes {step_ms} ms with {running} requests, and gives {tokens} tokens: "
        "{speed} tok/s".format_map(shown)
    ]
    for part in explained.parts:
        time = "     ?" if part.ms is None else f"{part.ms:6.2f}"
        lines.append(f"  {time} ms  {part.name}{part.source}")

    fault = explained.fault
    lines.append(f"at fault: {fault.what}" if fault.hint else fault.what)
    if fault.hint:
        lines.append(f"next: {fault.hint}")
    return tuple(lines)
