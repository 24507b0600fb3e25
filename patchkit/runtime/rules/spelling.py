"""Tell a slip of the pen from another name: one letter, or the same words in another order.

A likely name is not good enough to be advised: whoever follows a wrong "did you mean" sets a
variable that does something else. So digits do not count as slips (FP4 is not FP8), nor letters of
abbreviations (TP is not DP), nor words too few or too many (VLLM_HOST is not VLLM_HOST_IP).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from os.path import commonprefix

_WORD = 4  # letters from which on a word is more than an abbreviation
_LONGEST = (
    100  # characters; no name of vLLM or NCCL is half as long, and difflib is quadratic
)
_MOST = 100  # names of a file
_ALIKE = 0.8  # how alike two names have to be, from 0 to 1, for one to be a hint for the other


def is_slip(wrong: str, right: str) -> bool:
    """Return whether names differ by one letter, a swapped pair or the order of words."""
    wrong, right = wrong.upper().replace("-", "_"), right.upper().replace("-", "_")
    if wrong == right or abs(len(wrong) - len(right)) > 1:
        return False
    # What is left between the longest common beginning and the longest common end.
    start = len(commonprefix((wrong, right)))  # noqa: RUF071 (of names, not of paths)
    end = len(commonprefix((wrong[start:][::-1], right[start:][::-1])))  # noqa: RUF071
    one, other = wrong[start : len(wrong) - end], right[start : len(right) - end]
    if len(one) <= 1 and len(other) <= 1:
        word = min(
            len(name[:start].rpartition("_")[2]) + len(name[start:].partition("_")[0])
            for name in (wrong, right)
        )
        # TP is not DP: a letter of an abbreviation makes another one.
        other_word = len(one) == len(other) == 1 and word < _WORD
        return not other_word and not any(letter.isdigit() for letter in one + other)
    swapped = len(one) == 2 and one == other[::-1]
    words, others = (sorted(filter(None, name.split("_"))) for name in (wrong, right))
    return swapped or words == others


def nearest_hint(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return a hint at the name that is most alike, where a person decides; for none, another."""
    from difflib import get_close_matches  # seldom needed, and slow to load

    whole = {known.upper(): known for known in names} if len(name) <= _LONGEST else {}
    found = get_close_matches(name.upper(), whole, n=1, cutoff=_ALIKE)
    return f"did you mean {whole[found[0]]}?" if found else otherwise


@dataclass(slots=True)
class Slips:
    """Names that were meant, for those of one file; it takes time, so a hundred get an answer."""

    names: Iterable[str]
    made: dict[str, str] = field(default_factory=dict)

    def __call__(self, name: str) -> str:
        """Return the name that was meant; empty if none or several are one slip apart."""
        if name not in self.made and len(self.made) < _MOST and len(name) <= _LONGEST:
            found = [known for known in self.names if is_slip(name, known)]
            self.made[name] = found[0] if len(found) == 1 else ""
        return self.made.get(name, "")
