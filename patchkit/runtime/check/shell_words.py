"""Split the text of a shell script into commands and words, without expanding anything."""

import re
from collections.abc import Iterator

from patchkit.frozen import positional
from patchkit.runtime.check.content import Word

_PIECE = re.compile(
    r"""
    (?P<blank>(?:[ \t\r]|\\\n)+)
  | (?P<comment>(?<![^\s;&|()])\#[^\n]*)
  | (?P<document>(?<!<)<<-?[ \t]*(?P<quote>["']?)(?P<end>[A-Za-z_][\w.-]*)(?P=quote))
  | (?P<redirect>\d?(?:>>|>\||[<>])(?:&\d?-?|[ \t]*(?:'[^']*'|"[^"]*"|[^\s'"\\;&|()<>])*))
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


@positional
class Statement:
    """A command. ``is_indented`` says that its line is, as in a branch or a function."""

    words: list[Word]
    is_indented: bool


def unquote(text: str) -> str:
    """Return a word without its quotes."""
    return _QUOTED.sub(_strip_quotes, text)


def _strip_quotes(quoted: re.Match[str]) -> str:
    single, double, escaped = quoted.groups()
    if single is not None:
        return str(single)

    if double is not None:
        # A backslash before a line break is kept: if the text is read as a script, its lines count.
        return re.sub(r"\\([$`\"\\])", r"\1", double)

    return str(escaped).strip("\n")


def split_words(text: str, line: int) -> list[Word]:
    """Return the words of all commands of a text; ``line`` is the line where the text begins."""
    return [
        word for statement in split_statements(text, line) for word in statement.words
    ]


def split_statements(text: str, line: int = 1) -> Iterator[Statement]:
    """Yield the commands of a script; ``line`` is the line where the script begins."""
    words: list[Word] = []
    begins_line = True
    is_indented = False
    in_array = False  # A=( … ) is one list of words in several lines

    for kind, piece, number in _read_pieces(text, line):
        if begins_line:
            is_indented = kind == "blank"

        if kind == "array":
            in_array = True
        elif piece == ")":
            in_array = False
        begins_line = piece == "\n" and not in_array

        if kind == "word":
            words.append(Word(unquote(piece), number))
        elif kind == "stop" and words and not in_array:
            yield Statement(words, is_indented)
            words = []

    if words:
        yield Statement(words, is_indented)


def find_open_quote(text: str) -> int:
    """Return the line of a quote that a script opens and does not close, 0 for none."""
    pieces = _read_pieces(text, 1)
    return next((line for _kind, piece, line in pieces if piece in ("'", '"')), 0)


def _read_pieces(text: str, line: int) -> Iterator[tuple[str, str, int]]:
    """Yield the kind, the text and the line of each piece of a script, without here-documents.

    A here-document without an end is the last thing that is read.
    """
    position = 0
    document_ends: list[str] = []

    while match := _PIECE.match(text, position):
        yield str(match.lastgroup), match[0], line
        position = match.end()
        line += match[0].count("\n")

        if match["end"]:
            document_ends.append(match["end"])

        if match[0] != "\n":
            continue

        for end in document_ends:
            end_line = rf"^[ \t]*{re.escape(end)}[ \t]*$\n?"
            document = re.compile(end_line, re.MULTILINE).search(text, position)
            if document is None:
                return  # a shell takes the rest of the text for the document

            line += text.count("\n", position, document.end())
            position = document.end()
        document_ends.clear()
