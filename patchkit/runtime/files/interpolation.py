"""Expand ``$NAME`` and ``${NAME:-value}`` as compose, Dockerfiles and systemd do: no commands."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable

from patchkit.runtime.files.value import Piece, Value, known, unknown

Lookup = Callable[[str], Value | None]
"""Return the value of a name; None for one that the file does not set."""

_DEEPEST = 10  # ${A:-${B:-…}}
_PLACE = re.compile(
    r"\$(?:(?P<dollar>\$)|(?P<plain>[A-Za-z_]\w*)|"
    r"\{(?P<name>[A-Za-z_]\w*)(?P<sign>:?[-?+])?)"
)
_NEXT = re.compile(r"\$")
_NEXT_WITHIN = re.compile(r"[$}]")


def interpolate(
    text: str, line: int, lookup: Lookup, default: Callable[[str, Value], None] | None = None
) -> Value:
    """Return a text with what is known of its variables; ``$$`` is a dollar.

    ``line`` is that of its first character; ``default`` is called with each ``${NAME:-value}``.
    """
    if "$" not in text:
        return known(text, line)
    return _Expansion(text, line, lookup, default).value


class _Expansion:
    def __init__(
        self,
        text: str,
        line: int,
        lookup: Lookup,
        default: Callable[[str, Value], None] | None,
    ) -> None:
        self._text, self._first = text, line
        self._lookup, self._default = lookup, default
        self._ends = [match.start() for match in re.finditer("\n", text)]
        self.value, _ = self._read(0, 0)

    def _line(self, position: int) -> int:
        return self._first + bisect_left(self._ends, position)

    def _read(self, position: int, depth: int) -> tuple[Value, int]:
        """Expand up to the end, or inside of braces to the one that closes them."""
        text, start = self._text, position
        pieces: list[Piece] = []

        def plain(end: int) -> None:
            if start < end:
                pieces.append(Piece(text[start:end], self._line(start)))

        following = _NEXT_WITHIN if depth else _NEXT
        while match := following.search(text, position):
            if match[0] == "}":
                plain(match.start())
                return Value(tuple(pieces)), match.start()
            position = match.start() + 1
            place = _PLACE.match(text, match.start())
            if place is None or depth >= _DEEPEST:
                continue
            plain(match.start())
            if place["name"] is None:
                value, position = self._simple(place), place.end()
            else:
                value, position = self._braces(place, depth)
            pieces += value.pieces
            start = position
        plain(len(text))
        return Value(tuple(pieces)), len(text)

    def _simple(self, place: re.Match[str]) -> Value:
        line = self._line(place.start())
        if place["dollar"]:
            return known("$", line)
        name = place["plain"]
        return self._lookup(name) or unknown(place[0], line, _why(name))

    def _braces(self, place: re.Match[str], depth: int) -> tuple[Value, int]:
        name, sign, line = place["name"], place["sign"] or "", self._line(place.start())
        inner, end = self._read(place.end(), depth + 1)
        written = self._text[place.start() : end + 1]
        if end == len(self._text):
            return unknown(written, line, "a brace is not closed"), end
        if "-" in sign and self._default:
            self._default(name, inner)
        found = self._lookup(name)
        if "+" in sign or (inner.pieces and not sign):
            return unknown(written, line, f"it depends on {name}"), end + 1
        if found is not None and (found.text or ":" not in sign):
            return found, end + 1
        if "-" in sign:
            return (inner if inner.pieces else known("", line)).as_default(), end + 1
        return unknown(written, line, _why(name)), end + 1


def _why(name: str) -> str:
    return f"{name} is not set in this file"
