"""Split shell text into commands and words, with their lines; nothing is expanded or followed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from patchkit.runtime.check.content import Word

_PIECE = re.compile(
    r"""
    (?P<blank>(?:[ \t\r]|\\\n)+)
  | (?P<comment>(?<![^\s;&|()])\#[^\n]*)
  | (?P<document><<-?[ \t]*(?P<quote>["']?)(?P<end>[\w.-]+)(?P=quote))
  | (?P<redirect>\d?(?:>>|>\||[<>])(?:&\d?-?)?[ \t]*)
  | (?P<stop>\n|;+|&+|\|+|[()])
  | (?P<word>(?:
        '[^']*' | "(?:[^"\\]|\\.)*" | \\.
      | (?<==)<[\w .-]{1,60}>  # a placeholder, whatever a shell would make of it
      | \$\((?:[^()]|\([^()]*\))*\) | \$\{[^{}\n]*\} | `[^`]*`
      | [^\s'"\\;&|()<>`]
    )+ | .)
    """,
    re.VERBOSE | re.DOTALL,
)
_QUOTED = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)""", re.DOTALL)
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_MOST_UNENDED = 50  # here-documents without an end: each is looked for to the end of the text


class Statement(NamedTuple):
    """The words of one command; ``indented`` mostly means: in a branch or a function."""

    words: tuple[Word, ...]
    indented: bool


def unquote(text: str) -> str:
    """Return a word without its quotes."""
    return _QUOTED.sub(_strip_quotes, text)


def _strip_quotes(match: re.Match[str]) -> str:
    single, double, escaped = match.groups()
    if double is not None:
        # A backslash before a line break stays: what reads the text as a script counts lines.
        return re.sub(r"\\([$`\"\\])", r"\1", double)
    return str(escaped).strip("\n") if single is None else str(single)


def split_statements(text: str, line: int = 1) -> Iterator[Statement]:
    """Yield the commands of a script; ``line`` is that of its first character."""
    return _Splitter(text, line).split_text()


@dataclass(slots=True)
class _Splitter:
    text: str
    line: int
    words: list[Word] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    unended: set[str] = field(default_factory=set)  # what ends no document below
    in_array: bool = False
    is_target: bool = False  # the next word is a file that is read or written

    def split_text(self) -> Iterator[Statement]:
        position, indented, begins = 0, False, True
        while match := _PIECE.match(self.text, position):
            kind, piece = match.lastgroup, match[0]
            if begins:
                indented = kind == "blank"
            if kind == "word":
                self._add_word(piece)
            elif kind == "redirect":
                self.is_target = "&" not in piece
            elif kind == "document":
                self.documents.append(match["end"])
            elif kind == "stop" and self._ends_statement(piece):
                if self.words:
                    yield Statement(tuple(self.words), indented)
                self.words, self.is_target = [], False
            self.line += piece.count("\n")
            begins = piece == "\n" and not self.in_array
            position = self._skip_documents(match.end()) if piece == "\n" else match.end()
        if self.words:
            yield Statement(tuple(self.words), indented)

    def _add_word(self, piece: str) -> None:
        if not self.is_target:
            self.words.append(Word(unquote(piece), self.line))
        self.is_target = False

    def _ends_statement(self, piece: str) -> bool:
        """Return whether a sign ends a command; A=( … ) is one list of words in several lines."""
        if piece == "(" and self.words and _ARRAY.fullmatch(self.words[-1].text):
            self.in_array = True
            self.words.pop()
        elif piece == ")":
            self.in_array = False
        return not self.in_array

    def _skip_documents(self, position: int) -> int:
        """Return where the text goes on behind here-documents, and count their lines."""
        begin = position
        for end in self.documents:
            if end not in self.unended and len(self.unended) < _MOST_UNENDED:
                form = re.compile(rf"^[ \t]*{re.escape(end)}[ \t]*$\n?", re.MULTILINE)
                if found := form.search(self.text, position):
                    position = found.end()
                else:
                    self.unended.add(end)
        self.documents = []
        self.line += self.text.count("\n", begin, position)
        return position
