"""Tell a mistyped name from another name.

A name is mistyped if one letter is wrong, or two are swapped, or its words are in another order. A
name that is merely similar is not suggested, since a user who follows a wrong "did you mean" sets a
variable that does something else. So a different digit is another name (FP4, FP8), and so is a
different letter in an abbreviation (TP, DP), or a further word (VLLM_HOST, VLLM_HOST_IP).
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from os.path import commonprefix

_WORD = 4  # letters; a shorter word is an abbreviation
# Characters of a name that is looked up. Names of vLLM and NCCL have fewer than half of that, and
# the time that difflib takes grows with the square of the length.
_LONGEST = 100
_MOST = 100  # names to look up for one file
_ALIKE = 0.8  # similarity, from 0 to 1, from which on a name is suggested


def is_slip(wrong: str, right: str) -> bool:
    """Return whether names differ by one letter, a swapped pair or the order of words."""
    wrong, right = (name.upper().replace("-", "_") for name in (wrong, right))
    if wrong == right or abs(len(wrong) - len(right)) > 1:
        return False

    # Compare what is between the common beginning and the common end of both names.
    start = len(commonprefix((wrong, right)))  # noqa: RUF071 (of names, not of paths)
    tails = (wrong[start:][::-1], right[start:][::-1])
    end = len(commonprefix(tails))  # noqa: RUF071
    wrong_letters = wrong[start : len(wrong) - end]
    right_letters = right[start : len(right) - end]
    letters = wrong_letters + right_letters

    if len(wrong_letters) > 1 or len(right_letters) > 1:
        is_swapped_pair = len(letters) == 4 and wrong_letters == right_letters[::-1]
        return is_swapped_pair or sorted(wrong.split("_")) == sorted(right.split("_"))

    # In an abbreviation, another letter makes another abbreviation: TP is not DP.
    word_length = min(_word_length(wrong, start), _word_length(right, start))
    may_be_replaced = len(letters) == 1 or word_length >= _WORD
    return may_be_replaced and not any(map(str.isdigit, letters))


def _word_length(name: str, position: int) -> int:
    """Return the number of letters in the word at a position."""
    before = name[:position].rpartition("_")[2]
    return len(before) + len(name[position:].partition("_")[0])


def nearest_hint(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return a hint at the known name that is most similar, or ``otherwise`` if none is similar."""
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
    looked_up: int = 0

    def find_meant(self, name: str) -> str:
        """Return the known name that is one slip away, "" if there are none or several."""
        self.looked_up += 1
        if self.looked_up > _MOST or len(name) > _LONGEST:
            return ""

        candidates = [known for known in self.names if is_slip(name, known)]
        return candidates[0] if len(candidates) == 1 else ""
