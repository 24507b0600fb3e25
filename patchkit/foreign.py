"""Read numbers and JSON that others wrote; raise ValueError unless they are finite and bounded.

The answers of programs, nodes and servers are read here, so that no other module has to expect an
infinite number or endless nesting. This file is copied to nodes beside their scripts, so it needs
the standard library alone.
"""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any

_DIGITS = 25  # a whole number has fewer; a size in bytes has 20 at most
_MOST = 1 << 53  # a double can hold every whole number up to this one
_LATEST = 2**32  # seconds since 1970


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises ValueError if it is not JSON, nested too deeply, or has an infinite or too long number.
    """
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
    """Return a text as a finite number. Raises ValueError for NaN, infinity and other texts."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:_DIGITS]} is no finite number")
    return number


def read_count(text: str, most: float = math.inf) -> float:
    """Return a text as a finite number from 0 to ``most``. Raises ValueError for other texts."""
    number = read_number(text)
    if not 0 <= number <= most:
        raise ValueError(f"{number} is not from 0 to {most}")
    return number


def whole_number(value: object, most: int = _MOST) -> int:
    """Return a JSON value that is a whole number from 0 to ``most``; else raise ValueError."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("is no whole number")
    if not 0 <= value <= most:
        raise ValueError(f"is not from 0 to {most}")
    return value


def positive_number(value: object) -> float:
    """Return a JSON value that is a finite number above 0; for any other value, return 0."""
    if isinstance(value, int | float) and 0 < value <= sys.float_info.max:
        return float(value)
    return 0.0


def clock_text(moment: float) -> str:
    """Return a time in seconds since 1970, which may be any number, by this machine's clock."""
    return time.strftime("%F %T", time.localtime(min(abs(moment), _LATEST)))


def _parse_whole(text: str) -> int:
    if len(text) >= _DIGITS:
        raise ValueError(f"{text[:_DIGITS]}… has too many digits")
    return int(text)
