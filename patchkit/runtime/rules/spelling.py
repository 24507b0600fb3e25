"""Tell a slip of the pen from another name: one letter, or the same words in another order.

A likely name is not good enough to be advised: whoever follows a wrong "did you mean" sets a
variable that does something else. So digits do not count as slips (FP4 is not FP8), nor letters of
abbreviations (TP is not DP), nor words too few or too many (VLLM_HOST is not VLLM_HOST_IP).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"\d+")
_WORD = 4  # letters from which on a word is more than an abbreviation
_LONGEST = 100  # characters; no name of vLLM or NCCL is half as long


def is_slip(wrong: str, right: str) -> bool:
    """Return whether two names differ by one letter, a swapped pair or the order of their words.

    Capitals do not count; ``-`` and ``_`` separate words.
    """
    wrong, right = wrong.upper().replace("-", "_"), right.upper().replace("-", "_")
    if wrong == right or abs(len(wrong) - len(right)) > 1:
        return False
    # What is left between the longest common beginning and the longest common end.
    start = _common_length(wrong, right)
    end = _common_length(wrong[start:][::-1], right[start:][::-1])
    one, other = wrong[start : len(wrong) - end], right[start : len(right) - end]
    if len(one) <= 1 and len(other) <= 1:
        word = min(_length_at(wrong, start), _length_at(right, start))
        # TP is not DP: a letter of an abbreviation makes another one.
        other_word = len(one) == len(other) == 1 and word < _WORD
        return not other_word and not any(letter.isdigit() for letter in one + other)
    swapped = len(one) == 2 and one == other[::-1]
    return swapped or sorted(_split_words(wrong)) == sorted(_split_words(right))


def models_meant(name: str, known: Iterable[str]) -> list[str]:
    """Return the models that a mistyped name may stand for.

    Here a digit too few or too many counts, unless it makes another size: 12B for 120B, but not 3B
    for 32B.
    """
    if len(name) > _LONGEST:
        return []
    return [each for each in known if is_slip(name, each) or _lacks_digit(name, each)]


def _lacks_digit(one: str, other: str) -> bool:
    short, long = sorted((one.upper(), other.upper()), key=len)
    start = _common_length(short, long)
    if len(long) != len(short) + 1 or short[start:] != long[start + 1 :]:
        return False
    number = next(
        (each for each in _NUMBER.finditer(long) if each.start() <= start < each.end()), None
    )
    # Two digits for one are a size of its own; none for one, or two for three, is no name.
    return number is not None and len(number[0]) != 2


class Slips:
    """Names that were meant, for those of one file; it takes time, so a hundred get an answer."""

    _MOST = 100

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._made: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        """Return the name that was meant; empty if none or several are one slip apart."""
        if name not in self._made and len(self._made) < self._MOST and len(name) <= _LONGEST:
            found = [each for each in self._names if is_slip(name, each)]
            self._made[name] = found[0] if len(found) == 1 else ""
        return self._made.get(name, "")


def _length_at(name: str, position: int) -> int:
    """Return the length of the word that a position lies in, 0 between two separators."""
    return len(name[:position].rpartition("_")[2]) + len(name[position:].partition("_")[0])


def _common_length(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    for number, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return number
    return min(len(one), len(other))


def _split_words(name: str) -> list[str]:
    return [word for word in name.split("_") if word]
