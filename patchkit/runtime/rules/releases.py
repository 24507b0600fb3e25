"""Compare releases with ranges by the standard library alone: a node may have no `packaging`.

A development version or pre-release counts as the release that it leads to: ``0.33.1.dev12+g1a2b``
is in ``>=0.33.1``, because what a release brings is in its development versions first.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import lru_cache

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


@lru_cache(maxsize=1024)  # tables name the same few releases in every row
def release(version: str) -> tuple[int, ...]:
    """Return ``(0, 25, 1)`` of ``0.25.1rc2+cu130``, without zeros at the end. Raises UsageError."""
    match = _RELEASE.match(version.strip()) if len(version) <= LONGEST else None
    if match is None:
        raise UsageError(f"{version!r} is not a version", hint="write it as 0.25.1")
    return _release_numbers(match["release"])


def within(version: str, bounds: str) -> bool:
    """Return whether a version is in ``>=0.24,<0.33``; all are in ``""``. Raises UsageError."""
    found = release(version)
    return all(_is_within_bound(found, bound) for bound in bounds.split(",") if bound.strip())


def check_version(text: str) -> None:
    """Raise ValueError for what is not a version, for ``patchkit.records``."""
    _as_value_error(release, text)


def check_range(text: str) -> None:
    """Raise ValueError for what is not a range, for ``patchkit.records``."""
    _as_value_error(within, "0", text)


def _as_value_error(check: Callable[..., object], *arguments: str) -> None:
    try:
        check(*arguments)
    except UsageError as error:
        raise ValueError(error.what) from None


def _is_within_bound(found: tuple[int, ...], bound: str) -> bool:
    match = _BOUND.fullmatch(bound.strip())
    if match is None:
        raise UsageError(f"{bound.strip()!r} is not a bound", hint="write bounds as >=0.24,<0.33")
    return _SIGNS[match["sign"]](found, _release_numbers(match["release"]))


def _release_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.sub(r"(\.0+)+$", "", text).split(".")))
