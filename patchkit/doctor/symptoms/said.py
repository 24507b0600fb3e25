"""Match texts as programs print them: what varies has a name, blanks may be line breaks.

    Free memory on device {} ({free}/{total} GiB) on startup ... utilization

``{name}`` is one word, ``{}`` one that nobody asks for, ``...`` anything up to 500 characters; a
blank is one blank or the end of a line, two are any run of blanks, as in a table. Capitals do not
count. ``{{`` and ``}}`` are braces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

FEWEST = 5
"""Characters that a text needs in a row, without a gap: they are searched first."""

_RARE = 12  # characters from which on half of a run is rare enough
_OTHERS = re.compile(r"[^\x20-\x7e]+")
_WORD = r"[^\s]{1,200}?"
_GAP = r"[\s\S]{0,500}?"
_PART = re.compile(r"\{\{|\}\}|\{(?P<name>[a-z_]*)\}|\s*(?P<gap>\.\.\.)\s*|(?P<blank>\s+)")


@dataclass(frozen=True, slots=True)
class SaidText:
    """A text to look for: one of ``anchors``, in small letters, is in a line of what it matches."""

    text: str
    anchors: tuple[str, ...]
    pattern: re.Pattern[str]

    @property
    def weight(self) -> int:
        """Return how many characters have to be as they are: more are more specific."""
        return len(_PART.sub("", self.text))

    @property
    def names(self) -> frozenset[str]:
        """Return what of the text has a name."""
        return frozenset(self.pattern.groupindex)


def check_said(text: str) -> None:
    """Raise ValueError for what cannot be looked for, for ``patchkit.records``."""
    said(text)


@cache
def said(text: str) -> SaidText:
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
            parts.append(_GAP if found["gap"] else f"(?P<{name}>{word})" if name else word)
            names |= {name} if name else set()
            runs.append("")
    parts.append(re.escape(text[end:]))
    runs[-1] += text[end:]
    # grep knows capitals of ASCII alone.
    plain = (each.strip() for run in runs for each in _OTHERS.split(run))
    run = max(plain, key=len).lower()
    if len(run) < FEWEST:
        raise ValueError(f"has no {FEWEST} characters in a row: {text!r}")
    pattern = f"{_edge(text[:1], '<!')}{''.join(parts)}{_edge(text[-1:], '!')}"
    return SaidText(text, _halves(run), re.compile(pattern, re.IGNORECASE))


def _halves(run: str) -> tuple[str, ...]:
    """Return the halves of a long run: a line that breaks at a blank of one leaves the other."""
    blanks = (number for number, each in enumerate(run) if each == " ")
    middle = min(blanks, key=lambda number: abs(2 * number - len(run)), default=0)
    halves = run[:middle], run[middle + 1 :]
    return halves if min(map(len, halves)) >= _RARE else (run,)


def _edge(character: str, sign: str) -> str:
    """Return a bound of a word, where a text begins or ends with a letter or digit."""
    return rf"(?{sign}\w)" if character.isalnum() else ""
