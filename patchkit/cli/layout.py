"""Lay text out for the columns at hand.

Lines are broken at blanks alone: a word, a path or a command to paste stays whole, even if it is
longer than the line. A table that is too wide wraps its last column, or becomes a block of lines
for each row. In a pipe nothing is broken: a row is a line, for grep.
"""

from __future__ import annotations

import contextlib
import os
import re
import unicodedata
from collections.abc import Sequence
from typing import IO, Any

import click

from patchkit.cli.verbs import VERBS

_USUAL = 80  # of a terminal that does not say how wide it is
_LEAST = 40
_LEAST_PROSE = 28  # narrower, a wrapped column is a tower of single words
_GAP = "  "
_HANG = 4  # how far the lines of a block are indented below its first

PROGRAMS = (
    rf"(?:\S+/)?patchkit (?:{'|'.join(VERBS)})\b",
    r"sudo\b|chmod\b|chown\b|ethtool\b|rustup\b|ib_write_bw\b|ray start\b|docker run\b",
    r"(?:\S+/)?pip3? (?:install|download)\b|git (?:clone|config|fetch|checkout|am|-C)\b|ip link\b",
    r"apt(?:-get)? install\b|(?:cp|ls|tar|rm|rsync|set) -\w|mv [\0/{]|\S*python\S* -m patchkit\b",
)
"""Match the beginnings of commands in messages; they end at ``;``, a backtick or the line."""

# A style may stand before a command.
_WHOLE = re.compile(rf"`[^`\n]*`|(?<![^\s(m])(?:{'|'.join(PROGRAMS)})[^;`\n]*")
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
    margin = " " * (len(bare) - len(bare.lstrip(" ")) + hang)
    first, *rest = _words(text)
    lines, line = [], first
    for word in rest:
        if length(line) + 1 + length(word) <= width or not click.unstyle(line).strip():
            line += f" {word}"
        elif word:
            lines.append(line.rstrip(" "))
            line = margin + word
    return [*lines, line.rstrip(" ")]


def _words(text: str) -> list[str]:
    """Split a text at its blanks, but for those in a command and in backticks."""
    # No text for a terminal holds a NUL: it is escaped.
    kept = _WHOLE.sub(lambda found: found[0].rstrip().replace(" ", "\0"), text)
    return [word.replace("\0", " ") for word in kept.split(" ")]


def grid(
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    heads: Sequence[str] = (),
    indent: str = "",
) -> list[str]:
    """Return a text for each row, of one line or more; the heads come first.

    If the rows fit, columns are aligned, and those of numbers to the right. Else the last column is
    wrapped. If that would be too narrow, or break a word, each row is a text of its own, without
    heads and empty cells.
    """
    shown = [*([heads] if heads else []), *rows]
    if not shown:
        return []
    widths = [max(map(length, column)) for column in zip(*shown, strict=True)]
    before = len(indent) + sum(filled + len(_GAP) for filled in widths[:-1])
    room = None if width is None or before + widths[-1] <= width else width - before
    if width is not None and room is not None:
        longest = max((length(word) for row in rows for word in _words(row[-1])), default=0)
        if room < _LEAST_PROSE or longest > room:
            empty = ("", "-")
            full = [[it for it in row if click.unstyle(it).strip() not in empty] for row in rows]
            return ["\n".join(wrap(indent + _GAP.join(cells), width, _HANG)) for cells in full]
    numbers = [
        all(_NUMBER.fullmatch(click.unstyle(cell)) for cell in column)
        for column in zip(*rows, strict=True)
    ]
    lines = []
    for row in shown:
        padded = [
            " " * (filled - length(cell)) + cell if number else cell + " " * (filled - length(cell))
            for cell, filled, number in zip(row, widths, numbers or [False] * len(row), strict=True)
        ]
        last = wrap(padded.pop(), room, hang=0)
        start = indent + "".join(cell + _GAP for cell in padded)
        lines.append((start + ("\n" + " " * before).join(last)).rstrip(" "))
    return lines
