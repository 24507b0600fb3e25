"""Read the symptoms: what programs print when something is wrong, why, and what cures it.

Texts are matched as programs print them: what varies has a name, blanks may be line breaks.

    Free memory on device {} ({free}/{total} GiB) on startup ... utilization

``{name}`` is one word, ``{}`` one that nobody asks for, ``...`` anything up to 500 characters; a
blank is one blank or the end of a line, two are any run of blanks, as in a table. Capitals do not
count. ``{{`` and ``}}`` are braces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Literal

from patchkit.records import RECIPES, matching, read_toml
from patchkit.runtime.rules.broken import Broken, load_broken
from patchkit.runtime.rules.rule import Grounded

SYMPTOM_FILES = tuple(
    sorted((RECIPES / "symptoms").glob("*.toml"))
)  # one an area, by name
_FEWEST = (
    5  # characters that a text needs in a row, without a gap: they are searched first
)
_RARE = 12  # characters from which on half of a run is rare enough
_OTHERS = re.compile(r"[^\x20-\x7e]+")
_WORD = r"[^\s]{1,200}?"
_GAP = r"[\s\S]{0,500}?"
_PART = re.compile(
    r"\{\{|\}\}|\{(?P<name>[a-z_]*)\}|\s*(?P<gap>\.\.\.)\s*|(?P<blank>\s+)"
)


@dataclass(frozen=True, slots=True)
class TextPattern:
    """A text to look for: one of ``anchors``, in small letters, is in a line of what it matches.

    ``weight`` is how many characters have to be as they are: more are more specific.
    """

    text: str
    anchors: tuple[str, ...]
    expression: str
    weight: int = 0
    flags: re.RegexFlag = re.IGNORECASE

    @property
    def pattern(self) -> re.Pattern[str]:
        """Return the expression, compiled when it is met: a log has few of two thousand."""
        return _compiled(self.expression, self.flags)


@cache
def _compiled(expression: str, flags: re.RegexFlag) -> re.Pattern[str]:
    return re.compile(expression, flags)


@cache
def text_pattern(text: str) -> TextPattern:
    """Return a text ready to look for.

    Raises ValueError if it has less than five characters of ASCII in a row, or a name twice.
    """
    parts: list[str] = []
    runs, names, end = [""], set[str](), 0
    for found in _PART.finditer(text):
        literal = text[end : found.start()]
        parts.append(re.escape(literal))
        runs[-1] += literal
        end = found.end()
        if found[0] in ("{{", "}}"):
            parts.append(re.escape(found[0][0]))
            runs[-1] += found[0][0]
        elif found["blank"]:
            parts.append(r"\s+")
            runs[-1] += " "
            runs += [""] if len(found[0]) > 1 else []
        else:
            name = found["name"]
            if name in names:
                raise ValueError(f"has {{{name}}} twice: {text!r}")
            # At the end nothing stops a word but a blank.
            word = _WORD if end < len(text) else _WORD.rstrip("?")
            parts.append(
                _GAP if found["gap"] else f"(?P<{name}>{word})" if name else word
            )
            names |= {name} if name else set()
            runs.append("")
    parts.append(re.escape(text[end:]))
    runs[-1] += text[end:]
    # grep knows capitals of ASCII alone.
    plain = (each.strip() for run in runs for each in _OTHERS.split(run))
    run = max(plain, key=len).lower()
    if len(run) < _FEWEST:
        raise ValueError(f"has no {_FEWEST} characters in a row: {text!r}")
    # Of the halves of a long run one is in a line, where it breaks at the blank between them.
    blanks = (number for number, character in enumerate(run) if character == " ")
    middle = min(blanks, key=lambda number: abs(2 * number - len(run)), default=0)
    halves = run[:middle], run[middle + 1 :]
    anchors = halves if min(map(len, halves)) >= _RARE else (run,)
    # A letter or digit at an end is the end of a word.
    begin, end_of_word = (r"(?<!\w)", r"(?!\w)")
    pattern = f"{begin * text[:1].isalnum()}{''.join(parts)}{end_of_word * text[-1:].isalnum()}"
    weight = len(_PART.sub("", text))
    return TextPattern(text, anchors, pattern, weight)


Id = Annotated[
    str, matching(r"[a-z0-9]+(?:-[a-z0-9]+)*", "words of small letters with dashes")
]
PatternText = Annotated[str, text_pattern]


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
    seen: tuple[PatternText, ...] = ()
    unseen: tuple[PatternText, ...] = ()
    command: str = ""
    costs: str = ""
    tell: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """A text that somebody meets, in one of the forms of ``says``, and its causes by likelihood.

    One that ``follows`` only tells that something else has failed before; one that ``yields`` has
    causes of its own, unless another error stands in the same log. A server does not outlive what
    ``ends`` it, what ``lasts`` is wrong with one that serves, too, and what is of a ``request``
    is its client's. ``example`` are texts that are this symptom, ``other`` are near ones that are
    not. ``broken`` names rows of recipes/env/broken.toml, which are causes of it as well.
    """

    id: Id
    title: str
    says: tuple[PatternText, ...]
    level: Literal["error", "warning", "note"]
    cause: tuple[Cause, ...] = ()
    broken: tuple[str, ...] = ()
    example: tuple[str, ...]
    other: tuple[str, ...] = ()
    follows: bool = False
    yields: bool = False
    ends: bool = False
    lasts: bool = False
    request: bool = False


_SHARED = frozenset(part.name for part in fields(Broken))


@cache
def symptoms() -> Mapping[str, Symptom]:
    """Return all symptoms by their ids, in the order of the files and of their entries.

    Raises UsageError for a file that is not right, naming its line.
    """
    tables = (
        read_toml(tuple[Symptom, ...], file, key="symptom") for file in SYMPTOM_FILES
    )
    return {symptom.id: _with_broken(symptom) for table in tables for symptom in table}


def _with_broken(symptom: Symptom) -> Symptom:
    """Return a symptom with the faults of releases that it names as its first causes."""
    causes = []
    for name in symptom.broken:
        row = load_broken()[name]
        words = {
            part.name: getattr(row, part.name)
            for part in fields(Cause)
            if part.name in _SHARED
        }
        causes.append(Cause(**words))
    return replace(symptom, cause=(*causes, *symptom.cause))
