"""Split shell text into commands and words, with their lines; nothing is expanded or followed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from patchkit.runtime.check.content import Word

_PIECE = re.compile(
    r"""
    (?P<blank>(?:[ \t\r]|\\\n)+)
  | (?P<comment>(?<![^\s;&|()])\#[^\n]*)
  | (?P<document><<-?[ \t]*(?P<quote>["']?)(?P<end>[\w.-]+)(?P=quote))
  | (?P<redirect>\d?(?:>>|>\||[<>])(?:&\d?-?)?[ \t]*)
  | (?P<array>(?<![^\s;&|()])[A-Za-z_]\w*\+?=\()
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
_MOST_UNENDED = 50  # here-documents without an end: each is looked for to the end of the text


class Statement(NamedTuple):
    """The words of one command; ``indented`` mostly means: in a branch or a function."""

    words: tuple[Word, ...]
    indented: bool


def unquote(text: str) -> str:
    """Return a word without its quotes."""

    def strip(match: re.Match[str]) -> str:
        single, double, escaped = match.groups()
        if double is not None:
            # A backslash before a line break stays: what reads the text as a script counts lines.
            return re.sub(r"\\([$`\"\\])", r"\1", double)
        return str(escaped).strip("\n") if single is None else str(single)

    return _QUOTED.sub(strip, text)


def split_statements(text: str, line: int = 1) -> Iterator[Statement]:
    """Yield the commands of a script; ``line`` is that of its first character."""
    words: list[Word] = []
    documents: list[str] = []
    unended: set[str] = set()
    position, begins = 0, True
    indented = in_array = is_target = False
    while match := _PIECE.match(text, position):
        kind, piece, position = match.lastgroup, match[0], match.end()
        indented = kind == "blank" if begins else indented
        # A=( … ) is one list of words in several lines.
        in_array = kind == "array" or (in_array and piece != ")")
        begins = piece == "\n" and not in_array
        if kind == "word" and not is_target:
            words.append(Word(unquote(piece), line))
        elif kind == "document":
            documents.append(match["end"])
        elif kind == "stop" and not in_array and words:
            yield Statement(tuple(words), indented)
            words = []
        is_target = kind == "redirect" and "&" not in piece  # the next word is a file
        line += piece.count("\n")
        if piece == "\n" and documents:
            end = _skip_documents(text, position, documents, unended)
            line += text.count("\n", position, end)
            position, documents = end, []
    if words:
        yield Statement(tuple(words), indented)


def _skip_documents(text: str, position: int, ends: list[str], unended: set[str]) -> int:
    """Return where the text goes on behind here-documents; ``unended`` are ends that never come."""
    for end in ends:
        if end not in unended and len(unended) < _MOST_UNENDED:
            form = re.compile(rf"^[ \t]*{re.escape(end)}[ \t]*$\n?", re.MULTILINE)
            if found := form.search(text, position):
                position = found.end()
            else:
                unended.add(end)
    return position
