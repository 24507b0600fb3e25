"""Divide the time of a decoding step into parts, and name the part at fault. Pure."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from patchkit.finding import fill_texts
from patchkit.frozen import Texts, Values, frozen
from patchkit.records import RECIPES, read_toml

_BENCH = RECIPES / "bench.toml"

Quantities = Mapping[str, float | str | None]
"""What was measured of a server and read about it, by the names that bench.toml explains.

None is unknown.
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

    def time(self, quantities: Quantities) -> float | None:
        """Return the time in ms, None if a factor is unknown."""
        factors = [quantities.get(name) for name in self.factors]
        numbers = [factor for factor in factors if isinstance(factor, float)]
        return math.prod(numbers) if len(numbers) == len(factors) else None


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
    """Return the parts of a step, and the one at fault; ``step_ms`` is required."""
    step_ms = float(measured["step_ms"] or 0.0)
    quantities = {**measured}
    rest = step_ms
    for part in _PARTS:
        quantities["rest"] = rest
        ms = part.time(quantities)
        quantities[f"{part.id}_ms"] = ms
        quantities[f"{part.id}_share"] = ms and ms / step_ms
        rest -= ms or 0.0

    shown = _shown(quantities)
    fault = next(row for row in _FAULTS if _is_shown(row, quantities))
    texts = fill_texts({"what": fault.what, "hint": fault.hint}, shown)
    return StepParts(
        measured=measured,
        parts=tuple(
            replace(
                part,
                ms=part.time(quantities),
                source=part.source.format_map(shown),
            )
            for part in _PARTS
        ),
        fault=replace(fault, **texts),
    )


def _is_shown(fault: SpeedFault, quantities: Quantities) -> bool:
    return all(
        _holds(condition, quantities.get(name))
        for name, condition in fault.when.items()
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
