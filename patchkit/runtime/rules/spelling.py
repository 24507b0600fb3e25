"""Tell a slip of the pen from another name: one letter, or the same words in another order.

A likely name is not good enough to be advised: whoever follows a wrong "did you mean" sets a
variable that does something else. So digits do not count as slips (FP4 is not FP8), nor letters of
abbreviations (TP is not DP), nor words too few or too many (VLLM_HOST is not VLLM_HOST_IP).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from os.path import commonprefix

_WORD = 4  # letters from which on a word is more than an abbreviation
# Characters: no name of vLLM or NCCL is half as long, and difflib is quadratic.
_LONGEST = 100
_MOST = 100  # names of a file
_ALIKE = 0.8  # how alike two names have to be, from 0 to 1, for one to be a hint for the other


def is_slip(wrong: str, right: str) -> bool:
    """Return whether names differ by one letter, a swapped pair or the order of words."""
    wrong, right = (name.upper().replace("-", "_") for name in (wrong, right))
    if wrong == right or abs(len(wrong) - len(right)) > 1:
        return False

    # What is left between their common beginning and their common end.
    start = len(commonprefix((wrong, right)))  # noqa: RUF071 (of names, not of paths)
    tails = (wrong[start:][::-1], right[start:][::-1])
    end = len(commonprefix(tails))  # noqa: RUF071
    wrong_letters = wrong[start : len(wrong) - end]
    right_letters = right[start : len(right) - end]
    letters = wrong_letters + right_letters

    if len(wrong_letters) > 1 or len(right_letters) > 1:
        is_swapped_pair = len(letters) == 4 and wrong_letters == right_letters[::-1]
        return is_swapped_pair or sorted(wrong.split("_")) == sorted(right.split("_"))

    # TP is not DP: another letter in an abbreviation makes another one.
    word_length = min(_word_length(wrong, start), _word_length(right, start))
    may_be_replaced = len(letters) == 1 or word_length >= _WORD
    return may_be_replaced and not any(map(str.isdigit, letters))


def _word_length(name: str, position: int) -> int:
    """Return the number of letters in the word at a position."""
    before = name[:position].rpartition("_")[2]
    return len(before) + len(name[position:].partition("_")[0])


def nearest_hint(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return a hint at the most similar name, or ``otherwise`` if none is similar."""
    from difflib import get_close_matches  # seldom needed, and slow to load

    if len(name) > _LONGEST:
        return otherwise

    by_capitals = {known.upper(): known for known in names}
    matches = get_close_matches(name.upper(), by_capitals, n=1, cutoff=_ALIKE)

    return f"did you mean {by_capitals[matches[0]]}?" if matches else otherwise


@dataclass(slots=True)
class Slips:
    """Find the known names that the mistyped names of one file mean.

    The search is slow, so only the first hundred names are looked up.
    """

    names: Collection[str]
    meant_by_name: dict[str, str] = field(default_factory=dict)

    def find_meant(self, name: str) -> str:
        """Return the known name that is one slip away, "" if there are none or several."""
        if name not in self.meant_by_name:
            if len(self.meant_by_name) == _MOST or len(name) > _LONGEST:
                return ""
            candidates = [known for known in self.names if is_slip(name, known)]
            is_certain = len(candidates) == 1
            self.meant_by_name[name] = candidates[0] if is_certain else ""

        return self.meant_by_name[name]
