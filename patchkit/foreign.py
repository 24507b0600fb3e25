"""Read numbers and JSON that somebody else wrote: finite and of a bounded size, or ValueError.

The answers of programs, nodes and servers are read here, so that no infinite number and no endless
nesting gets any further. Nodes have this file beside their scripts, with the standard
library alone.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

_DIGITS = 25  # of a whole number: a size in bytes has 20 at most
_MOST = 1 << 53  # up to here a double has every whole number


def read_json(text: str | bytes) -> Any:
    """Return the value of a text in JSON. Raises ValueError, also for too deep nesting."""
    try:
        return json.loads(
            text,
            parse_int=_parse_whole,
            parse_float=read_number,
            parse_constant=read_number,
        )
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def read_number(text: str) -> float:
    """Return a finite number. Raises ValueError for NaN, an infinite one, and no number."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:_DIGITS]} is no finite number")
    return number


def read_count(text: str) -> float:
    """Return a finite number that is not negative. Raises ValueError."""
    number = read_number(text)
    if number < 0:
        raise ValueError(f"{text[:_DIGITS]} counts nothing")
    return number


def whole_number(value: object, most: int = _MOST) -> int:
    """Return a value of JSON as a whole number from 0 to ``most``. Raises ValueError."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("is no whole number")
    if not 0 <= value <= most:
        raise ValueError(f"is not from 0 to {most}")
    return value


def positive_number(value: object) -> float:
    """Return a value of JSON as a finite number above 0; 0 for anything else."""
    if isinstance(value, int | float) and 0 < value <= sys.float_info.max:
        return float(value)
    return 0.0


def _parse_whole(text: str) -> int:
    if len(text) >= _DIGITS:
        raise ValueError(f"{text[:_DIGITS]}… has too many digits")
    return int(text)
