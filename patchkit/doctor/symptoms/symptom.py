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

from patchkit.frozen import frozen
from patchkit.records import RECIPES, matching, read_toml
from patchkit.runtime.rules.broken import Broken, load_broken
from patchkit.runtime.rules.rule import Grounded

SYMPTOM_FILES = sorted((RECIPES / "symptoms").glob("*.toml"))
"""One file for each area, by name."""

# Characters that a text needs in a row, without a gap: grep searches for them.
_FEWEST = 5
# Half of a run of characters is rare enough from this length on.
_RARE = 12
_OTHER_THAN_ASCII = re.compile(r"[^\x20-\x7e]+")
_WORD = r"[^\s]{1,200}?"
_GAP = r"[\s\S]{0,500}?"
_PART = re.compile(
    r"(?P<brace>\{\{|\}\})|\{(?P<name>[a-z_]*)\}"
    r"|\s*(?P<gap>\.\.\.)\s*|(?P<blank>\s+)"
)


@dataclass(frozen=True, slots=True)
class TextPattern:
    """A text to look for: a line that it matches has one of ``anchors``, in small letters.

    ``weight`` counts the characters that do not vary: a text with more of them is more specific.
    """

    text: str
    anchors: tuple[str, ...]
    expression: str
    weight: int = 0
    flags: re.RegexFlag = re.IGNORECASE


@cache
def text_pattern(text: str) -> TextPattern:
    """Return a text ready to look for.

    Raise ValueError if it has less than five ASCII characters in a row, or a name twice.
    """
    expression = ""
    names = set[str]()

    end = 0
    for part in _PART.finditer(text):
        name = part["name"]
        if name in names:
            raise ValueError(f"has {{{name}}} twice: {text!r}")
        if name:
            names.add(name)

        expression += re.escape(text[end : part.start()])
        expression += _part_expression(part)
        end = part.end()
    expression += re.escape(text[end:])

    # A letter or digit at an end is the end of a word.
    begins = r"(?<!\w)" if text[:1].isalnum() else ""
    ends = r"(?!\w)" if text[-1:].isalnum() else ""
    return TextPattern(
        text=text,
        anchors=_anchors(text),
        expression=f"{begins}{expression}{ends}",
        weight=len(_PART.sub("", text)),
    )


def _part_expression(part: re.Match[str]) -> str:
    if part["brace"]:
        return re.escape(part[0][0])
    if part["gap"]:
        return _GAP

    if part["blank"]:
        return r"\s+"

    # At the end of the text only a blank ends a word.
    is_last = part.end() == len(part.string)
    word = _WORD.rstrip("?") if is_last else _WORD
    return f"(?P<{part['name']}>{word})" if part["name"] else word


def _anchors(text: str) -> tuple[str, ...]:
    """Return the longest run of plain characters, or both halves of a long one.

    A long run may break at the blank in its middle: then one half is in a line.
    """
    plain = _PART.sub(_plain_part, text)

    # grep ignores the case of ASCII letters alone.
    runs = [run.strip() for run in _OTHER_THAN_ASCII.split(plain)]

    longest = max(runs, key=len).lower()
    if len(longest) < _FEWEST:
        raise ValueError(f"has no {_FEWEST} characters in a row: {text!r}")

    blanks = (blank.start() for blank in re.finditer(" ", longest))
    middle = min(
        blanks,
        key=lambda place: abs(2 * place - len(longest)),
        default=0,
    )

    halves = (longest[:middle], longest[middle + 1 :])
    return halves if min(map(len, halves)) >= _RARE else (longest,)


def _plain_part(part: re.Match[str]) -> str:
    """Return a brace or a blank as it is; a line feed, which ends a run, for all else."""
    if part["brace"]:
        return part[0][0]

    is_one_blank = part["blank"] and len(part[0]) == 1
    return " " if is_one_blank else "\n"


Id = Annotated[
    str, matching(r"[a-z0-9]+(?:-[a-z0-9]+)*", "words of small letters with dashes")
]
PatternText = Annotated[str, text_pattern]


@frozen
class Cause(Grounded):
    """Why a text was printed, while ``when`` holds, and what cures that.

    ``matches`` is a pattern for the printed text, for causes that its numbers decide. ``seen`` are
    texts that must be elsewhere in the same log, ``unseen`` texts that must not.
    ``command`` cures it or shows it, ``costs`` is what the cure costs, and the command ``tell``
    tells this cause from the other causes of its symptom.
    """

    cause: str
    cure: str
    matches: Annotated[str, re.compile] = ""
    seen: tuple[PatternText, ...] = ()
    unseen: tuple[PatternText, ...] = ()
    command: str = ""
    costs: str = ""
    tell: str = ""


@frozen
class Symptom:
    """A text that programs print, in one of the forms of ``says``, and its causes by likelihood.

    ``follows``: it only tells that something else failed before. ``yields``: it has causes, unless
    the same log has another error. ``ends``: no server outlives it. ``lasts``: a server that serves
    has not overcome it. ``request``: the client of the server is to blame.
    ``example`` are texts that are this symptom, ``other`` are similar texts that are not.
    ``broken`` names rows of recipes/env/broken.toml, which are further causes.
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


@cache
def symptoms() -> Mapping[str, Symptom]:
    """Return all symptoms by their ids, in the order of the files and of their entries.

    Raise UsageError for an invalid file, with the line.
    """
    entries: dict[str, Symptom] = {}
    for file in SYMPTOM_FILES:
        for symptom in read_toml(tuple[Symptom, ...], file, key="symptom"):
            entries[symptom.id] = _with_broken(symptom)

    return entries


def _with_broken(symptom: Symptom) -> Symptom:
    """Return a symptom with the faults of releases that it names as its first causes."""
    shared = {part.name for part in fields(Cause)} & {
        part.name for part in fields(Broken)
    }

    causes = []
    for name in symptom.broken:
        row = load_broken()[name]
        values = {key: getattr(row, key) for key in shared}
        causes.append(Cause(**values))

    return replace(symptom, cause=(*causes, *symptom.cause))


@frozen
class LogFact:
    """A fact that a log may state: ``value``, or what stands at {value} of the text."""

    name: str
    says: tuple[PatternText, ...]
    value: str = ""


@frozen
class LogWords:
    """Texts that state facts; ``marks`` are texts that tell of the life of a server, by name."""

    fact: tuple[LogFact, ...]
    marks: Mapping[str, tuple[PatternText, ...]]


@cache
def log_words() -> LogWords:
    """Return the content of recipes/doctor/logs.toml."""
    return read_toml(LogWords, RECIPES / "doctor" / "logs.toml")
