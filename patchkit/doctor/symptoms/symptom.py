"""Read the symptoms: what programs print when something is wrong, why, and what cures it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from patchkit.doctor.symptoms.said import SaidText, check_said, said
from patchkit.paths import RECIPES
from patchkit.records import matching, read_toml
from patchkit.runtime.rules.rule import Grounded

FOLDER = RECIPES / "symptoms"
Id = Annotated[str, matching(r"[a-z0-9]+(?:-[a-z0-9]+)*", "words of small letters with dashes")]
SaidIn = Annotated[str, check_said]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause(Grounded):
    """Why a text was printed, while ``when`` holds, and what cures that.

    ``matches`` is a pattern for the text that was printed, where its numbers decide. ``seen`` are
    texts that must be elsewhere in the same log, ``unseen`` those that must not.
    ``command`` is one that cures it or shows it, ``costs`` what the cure costs, ``tell`` the
    command that tells this cause from the symptom's others.
    """

    cause: str
    cure: str
    matches: Annotated[str, re.compile] = ""
    seen: tuple[SaidIn, ...] = ()
    unseen: tuple[SaidIn, ...] = ()
    command: str = ""
    costs: str = ""
    tell: str = ""

    @property
    def is_default(self) -> bool:
        """Return whether it has no condition: then it holds where no other cause does."""
        return not (self.when or self.matches or self.seen or self.unseen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """A text that somebody meets, in one of the forms of ``says``, and its causes by likelihood.

    One that ``follows`` only tells that something else has failed before; one that ``yields`` has
    causes of its own, unless another error stands in the same log. A server does not outlive what
    ``ends`` it, what ``lasts`` is wrong with one that serves, too, and what is of a ``request``
    is its client's. ``example`` are texts that are this symptom, ``other`` are near ones that are
    not.
    """

    id: Id
    title: str
    says: tuple[SaidIn, ...]
    level: Literal["error", "warning", "note"]
    cause: tuple[Cause, ...]
    example: tuple[str, ...]
    other: tuple[str, ...] = ()
    follows: bool = False
    yields: bool = False
    ends: bool = False
    lasts: bool = False
    request: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for an entry whose parts contradict each other."""
        ids = [each.id for each in self.cause]
        if not self.says or not self.cause or not self.example:
            raise ValueError("lacks what it says, a cause or an example")
        if len({*ids}) < len(ids):
            raise ValueError("has two causes of one name")
        if [each.id for each in self.cause if each.is_default] not in ([], ids[-1:]):
            raise ValueError("a cause without conditions comes last")

    @property
    def texts(self) -> tuple[SaidText, ...]:
        """Return what it says, ready to look for."""
        return tuple(map(said, self.says))


@cache
def symptoms() -> Mapping[str, Symptom]:
    """Return all symptoms by their ids, in the order of the files and of their entries.

    Raises UsageError for a file that is not right, naming its line.
    """
    return {each.id: each for each in _read()}


def symptom_files() -> list[Path]:
    """Return the files of symptoms, one an area, by name."""
    return sorted(FOLDER.glob("*.toml"))


def _read() -> Iterator[Symptom]:
    for place in symptom_files():
        yield from read_toml(tuple[Symptom, ...], place, key="symptom")
