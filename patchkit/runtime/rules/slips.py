"""Tell a mistyped name from another name: ``gpt-oss-12b`` is a slip, ``Qwen2.5-3B`` a size."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"\d+(?:\.\d+)*")
_SHORT = 8  # characters: a shorter name is another one after two changes
_LONGEST = 200  # characters of a name that is compared


def slip_of(name: str, known: Iterable[str]) -> str:
    """Return the known name that was meant, ``""`` if none is that near; capitals do not matter."""
    if len(name) > _LONGEST:
        return ""
    wanted = name.lower()
    most = 1 if len(name) < _SHORT else 2
    near = [
        (slips, each)
        for each in known
        if abs(len(each) - len(name)) <= most
        and 0 < (slips := _slips(wanted, each.lower())) <= most
        and not _another_number(wanted, each.lower())
    ]
    return min(near, default=(0, ""))[1]


def _slips(one: str, other: str) -> int:
    """Return how many characters are missing, too many, wrong or swapped with the next one."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        former, before, row = before, row, [i]
        for j, right in enumerate(other, 1):
            least = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (left != right))
            if i > 1 and j > 1 and (left, one[i - 2]) == (other[j - 2], right):
                least = min(least, former[j - 2] + 1)
            row.append(least)
    return row[-1]


def _another_number(one: str, other: str) -> bool:
    """Return whether names differ in numbers alone, and these are sizes or versions of their own.

    A digit too few or two that are swapped are a slip, where something is left: 12 for 120, but not
    3 for 32, nor 3.5 for 3.6.
    """
    if _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
        return False
    pairs = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
    differ = [pair for pair in pairs if pair[0] != pair[1]]
    return not all(_is_slip(*pair) for pair in differ)


def _is_slip(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    if len(short) == len(long):
        return sorted(short) == sorted(long)
    return len(short) > 1 and _slips(short, long) == len(long) - len(short) == 1
