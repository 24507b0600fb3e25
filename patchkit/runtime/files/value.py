"""Hold a text whose parts are known or not, each with the line that it comes from."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from patchkit.runtime.files.content import Word

_PIECE = 16  # what a piece takes beside its text
_PARTS = re.compile(r"(?P<blanks>\s+)|\S+")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text. ``why`` says why it is not known, and the text is then as written."""

    text: str
    line: int
    why: str = ""
    default: bool = False


@dataclass(frozen=True, slots=True)
class Value:
    """A text in its parts. ``several``: it stands for any number of words, none of them known.

    ``items``: the words of an array; None for what is none.
    """

    pieces: tuple[Piece, ...] = ()
    several: bool = False
    items: tuple[Value, ...] | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def line(self) -> int:
        return self.pieces[0].line if self.pieces else 0

    @property
    def why(self) -> str:
        """Return why the text is not known; empty if it is."""
        return next((piece.why for piece in self.pieces if piece.why), "")

    @property
    def default(self) -> bool:
        return any(piece.default for piece in self.pieces)

    @property
    def size(self) -> int:
        """Return about how many characters it takes, in all items of an array."""
        items = sum(item.size for item in self.items or ())
        return items + sum(len(piece.text) + _PIECE for piece in self.pieces)

    def __add__(self, other: Value) -> Value:
        return Value(self.pieces + other.pieces, self.several and other.several)

    def cut(self, count: int) -> Value:
        """Return it without its first characters."""
        pieces = []
        for piece in self.pieces:
            kept = piece.text[count:]
            count = max(0, count - len(piece.text))
            if kept or not piece.text:
                pieces.append(replace(piece, text=kept))
        return Value(tuple(pieces))

    def as_default(self) -> Value:
        """Return the same as what holds if nobody gives another value."""
        pieces = tuple(replace(piece, default=True) for piece in self.pieces)
        items = None if self.items is None else tuple(each.as_default() for each in self.items)
        return Value(pieces, self.several, items)

    def word(self, line: int = 0) -> Word:
        """Return it as a word of a command; ``line`` is that of an empty one."""
        return Word(self.text, self.line or line, not self.why, self.several, self.default)


def known(text: str, line: int) -> Value:
    """Return a text that is known."""
    return Value((Piece(text, line),))


def unknown(text: str, line: int, why: str, *, several: bool = False) -> Value:
    """Return what is not known, as it is written."""
    return Value((Piece(text, line, why),), several)


def joined(values: Iterable[Value], between: str = "") -> Value:
    """Return texts one behind the other."""
    pieces: list[Piece] = []
    for number, value in enumerate(values):
        if number and between:
            pieces.append(Piece(between, value.line or pieces[-1].line if pieces else 1))
        pieces += value.pieces
    return Value(tuple(pieces))


def split(parts: Iterable[tuple[Value, bool]]) -> Iterator[Value]:
    """Yield words of the parts of a text; blanks end a word in those that are to be split."""
    word: list[Piece] = []
    begun = several = False
    for value, is_split in parts:
        if not is_split:
            word += value.pieces
            begun, several = True, False
            continue
        for piece in value.pieces:
            if not piece.text:  # that a value is empty by default is worth keeping
                word.append(piece)
                continue
            if piece.why:
                several = not begun
                word.append(piece)
                begun = True
                continue
            for part in _PARTS.finditer(piece.text):
                if not part["blanks"]:
                    word.append(replace(piece, text=part[0]))
                    begun, several = True, False
                    continue
                if begun:
                    yield Value(tuple(word), several)
                # What is empty before blanks is no word, and no part of the next one.
                word, begun, several = [], False, False
    if begun:
        yield Value(tuple(word), several)


class MappedText:
    """A text as UTF-8, and the line of the file for each place in it."""

    def __init__(self, value: Value) -> None:
        starts, lines, parts, offset = [0], [value.line or 1], [], 0
        for piece in value.pieces:
            data = piece.text.encode(errors="surrogatepass")
            starts.append(offset)
            lines.append(piece.line)
            for number, match in enumerate(re.finditer(b"\n", data), 1):
                starts.append(offset + match.end())
                lines.append(piece.line + number)
            parts.append(data)
            offset += len(data)
        self.data = b"".join(parts)
        self._starts, self._lines = starts, lines

    def line(self, offset: int) -> int:
        """Return the line of a byte."""
        return self._lines[bisect_right(self._starts, offset) - 1]

    def lines(self) -> list[int]:
        """Return the line of the file for each line of the text, from the first on."""
        ends = [match.end() for match in re.finditer(b"\n", self.data)]
        return [self.line(start) for start in (0, *ends)]

    def text(self, start: int, end: int) -> str:
        """Return a part of the text."""
        part = self.data[start:end]
        try:
            return part.decode(errors="surrogatepass")
        except UnicodeDecodeError:
            return part.decode(errors="replace")  # the parser may end inside of a character
