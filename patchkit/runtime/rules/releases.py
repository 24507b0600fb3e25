"""Releases in ranges, with nothing but the standard library: a node may have no `packaging`.

A development version or pre-release counts as the release that it leads to: ``0.33.1.dev12+g1a2b``
is in ``>=0.33.1``, because what a release brings is in its development versions first.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from patchkit.errors import UsageError

_RELEASE = re.compile(r"v?(?:\d+!)?(?P<release>\d+(?:\.\d+)*)(?![\d!])")
_BOUND = re.compile(r"(?P<sign>>=|<=|==|!=|>|<)\s*(?P<release>\d+(?:\.\d+)*)")
LONGEST = 100  # characters of a version; Python refuses to read numbers of thousands of digits
_SIGNS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def release(version: str) -> tuple[int, ...]:
    """``0.25.1rc2+cu130`` → ``(0, 25, 1)``, zeros at the end left out. Raises UsageError."""
    match = _RELEASE.match(version.strip()) if len(version) <= LONGEST else None
    if match is None:
        raise UsageError(f"{version!r} is not a version", hint="write it as 0.25.1")
    return _numbers(match["release"])


def within(version: str, bounds: str) -> bool:
    """Whether a version is in ``>=0.24,<0.33``; every version is in ``""``. Raises UsageError."""
    found = release(version)
    return all(_holds(found, bound) for bound in bounds.split(",") if bound.strip())


def _holds(found: tuple[int, ...], bound: str) -> bool:
    match = _BOUND.fullmatch(bound.strip())
    if match is None:
        raise UsageError(f"{bound.strip()!r} is not a bound", hint="write bounds as >=0.24,<0.33")
    return _SIGNS[match["sign"]](found, _numbers(match["release"]))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.sub(r"(\.0+)+$", "", text).split(".")))
