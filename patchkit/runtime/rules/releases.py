"""Compare releases with ranges by the standard library alone: a node may have no `packaging`.

A development version or pre-release counts as the release that it leads to: ``0.33.1.dev12+g1a2b``
is in ``>=0.33.1``, because what a release brings is in its development versions first.
"""

from __future__ import annotations

import operator
import re
from functools import lru_cache

from patchkit.errors import UsageError

_RELEASE = re.compile(r"v?(?:\d+!)?(?P<release>\d+(?:\.\d+)*)(?![\d!])")
_BOUND = re.compile(r"\s*(?P<sign>>=|<=|==|!=|>|<)\s*(?P<release>\d+(?:\.\d+)*)\s*")
LONGEST = 100  # characters of a version; Python refuses to read numbers of thousands of digits
_SIGNS = {
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
    return tuple(map(int, re.sub(r"(\.0+)+$", "", match["release"]).split(".")))


def within(version: str, bounds: str) -> bool:
    """Return whether a version is in ``>=0.24,<0.33``; all are in ``""``. Raises UsageError."""
    found = release(version)
    for bound in filter(str.strip, bounds.split(",")):
        match = _BOUND.fullmatch(bound)
        if match is None:
            raise UsageError(
                f"{bound.strip()!r} is not a bound", hint="write bounds as >=0.24,<0.33"
            )
        if not _SIGNS[match["sign"]](found, release(match["release"])):
            return False
    return True


def check_version(text: str) -> None:
    """Raise ValueError for what is not a version, for ``patchkit.records``."""
    try:
        release(text)
    except UsageError as error:
        raise ValueError(error.what) from None


def check_range(text: str) -> None:
    """Raise ValueError for what is not a range, for ``patchkit.records``."""
    for bound in text.split(","):  # one by one, since the first that fails ends a comparison
        try:
            within("0", bound)
        except UsageError as error:
            raise ValueError(error.what) from None
