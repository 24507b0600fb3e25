"""Return the values that the variables of a release of vLLM take, by ``vllm_values.tsv``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from patchkit.paths import RECIPES
from patchkit.runtime.rules.lifetimes import read_table
from patchkit.runtime.rules.releases import release

ONE, SEVERAL, INTEGER, NUMBER = "one of", "some of", "integer", "number"
PLACE = RECIPES / "env" / "vllm_values.tsv"
_SHOWN = 8  # words in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Takes:
    """The values at whose lack a vLLM stops: ``how`` is a word above, ``words`` its choices."""

    how: str
    words: tuple[str, ...] = ()
    any_case: bool = False

    @classmethod
    def parse(cls, text: str) -> Takes:
        """Read what ``str`` gives: ``one of: a, b`` or ``one of, any case: a, b``."""
        kind, _, words = text.partition(": ")
        how, _, case = kind.partition(", ")
        return cls(how=how, words=tuple(filter(None, words.split(", "))), any_case=bool(case))

    def __str__(self) -> str:
        case = ", any case" if self.any_case else ""
        return f"{self.how}{case}: {', '.join(self.words)}" if self.words else self.how

    @property
    def in_words(self) -> str:
        """Return what it takes, for messages."""
        if not self.words:
            return {INTEGER: "a whole number", NUMBER: "a number"}[self.how]
        more = len(self.words) - _SHOWN
        return ", ".join(self.words[:_SHOWN]) + (f" and {more} others" if more > 0 else "")

    def has(self, value: str) -> bool:
        """Return whether a value is taken, as ``envs.py`` decides it."""
        if self.how in (INTEGER, NUMBER):
            try:
                (int if self.how == INTEGER else float)(value)
            except ValueError:
                return False
            return True
        words, given = [*self.words], [value]
        if self.how == SEVERAL:
            given = list(filter(None, map(str.strip, value.split(","))))
        if self.any_case:
            words, given = ([text.lower() for text in texts] for texts in (words, given))
        return {*given} <= {*words}


@cache
def vllm_values(version: str) -> Mapping[str, Takes]:
    """Return name → the values that a release takes, what one of them takes for ``""``.

    Names that take anything are left out. Of releases outside of the table nothing is known.
    Raises UsageError for what is no version.
    """
    table = read_table(PLACE)
    if version:
        is_known = table.oldest <= release(version) <= release(table.newest)
        return {name: Takes.parse(text) for name, text in table.at(version).items() if is_known}
    found: dict[str, Takes] = {}
    for row in table.rows:
        takes = Takes.parse(row.default)
        before = found.get(row.name, takes)
        words = tuple(dict.fromkeys((*before.words, *takes.words)))
        any_case = before.any_case or takes.any_case
        found[row.name] = Takes(how=takes.how, words=words, any_case=any_case)
    return found


def values_by_release(name: str) -> list[tuple[str, str, Takes]]:
    """Return first and last release, and what a variable takes in these; the oldest first."""
    rows = (row for row in read_table(PLACE).rows if row.name == name)
    return [(row.first, row.last, Takes.parse(row.default)) for row in rows]
