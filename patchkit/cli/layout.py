"""Lay text out for the columns at hand.

Lines are broken at blanks alone, and not where a command stands to be pasted: in backticks, or
behind ``next:``. In a pipe nothing is broken: a row is a line, for grep.
"""

from __future__ import annotations

import contextlib
import os
import re
import unicodedata
from collections.abc import Sequence
from typing import IO, Any

import click

_USUAL = 80  # of a terminal that does not say how wide it is
_LEAST = 40
_LEAST_PROSE = 28  # narrower, a wrapped column is a tower of single words
_GAP = "  "
_WHOLE = re.compile(r"`[^`\n]*`")
_PASTED = re.compile(r" *(next|undo)\b")
_NUMBER = re.compile(r"[\d.,]+|[-?]?")


def columns(stream: IO[Any]) -> int | None:
    """Return how many columns a line may fill in a terminal (COLUMNS overrides); None in a pipe."""
    # Some programs hand COLUMNS on to what they read: in a pipe it says nothing.
    if not stream.isatty():
        return None
    found = os.environ.get("COLUMNS", "")
    number = int(found) if found.isdecimal() else 0
    if not number:
        with contextlib.suppress(OSError, ValueError):
            number = os.get_terminal_size(stream.fileno()).columns
    return max(number, _LEAST) if number else _USUAL


def length(text: str) -> int:
    """Return the columns that a text fills: styles fill none, wide characters two."""
    bare = click.unstyle(text)
    if bare.isascii():
        return len(bare)
    return len(bare) + sum(unicodedata.east_asian_width(character) in "WF" for character in bare)


def wrap(text: str, width: int | None, hang: int = 2) -> list[str]:
    """Return a text as lines that fit; those after the first are indented by ``hang`` more."""
    if width is None or length(text) <= width:
        return [text.rstrip(" ")]
    bare = click.unstyle(text)
    if _PASTED.match(bare):
        return [text.rstrip(" ")]
    margin = " " * (len(bare) - len(bare.lstrip(" ")) + hang)
    # Commands in backticks are not broken. No text for a terminal holds a NUL: it is escaped.
    kept = _WHOLE.sub(lambda found: found[0].replace(" ", "\0"), text)
    first, *rest = (word.replace("\0", " ") for word in kept.split(" "))
    lines, line = [], first
    for word in rest:
        if length(line) + 1 + length(word) <= width or not click.unstyle(line).strip():
            line += f" {word}"
        elif word:
            lines.append(line.rstrip(" "))
            line = margin + word
    return [*lines, line.rstrip(" ")]


def grid(
    rows: Sequence[Sequence[str]], width: int | None, *, heads: Sequence[str] = (), indent: str = ""
) -> list[str]:
    """Return a text for each row, of one line or more; the heads come first.

    Columns are aligned, those of numbers to the right; the last one is wrapped where it has to be.
    """
    if not rows:
        return []
    shown = [*([heads] if heads else []), *rows]
    widths = [max(map(length, column)) for column in zip(*shown, strict=True)]
    numbers = [
        all(_NUMBER.fullmatch(click.unstyle(cell)) for cell in column)
        for column in zip(*rows, strict=True)
    ]
    before = len(indent) + sum(filled + len(_GAP) for filled in widths[:-1])
    room = None if width is None else max(width - before, _LEAST_PROSE)
    lines = []
    for row in shown:
        padded = [
            " " * (filled - length(cell)) + cell if number else cell + " " * (filled - length(cell))
            for cell, filled, number in zip(row, widths, numbers, strict=True)
        ]
        last = wrap(padded.pop().rstrip(" "), room, hang=0)
        start = indent + "".join(cell + _GAP for cell in padded)
        lines.append((start + ("\n" + " " * before).join(last)).rstrip(" "))
    return lines
