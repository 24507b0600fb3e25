"""CMake text as tokens, commands and list edits, without losing a character.

The rules are those of CMake's own lexer (Source/LexerParser/cmListFileLexer.in.l). As there,
only LF and CRLF end a line: a lone CR is blank space, does not end a comment and is not counted.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from patchkit.edit.splice import Edit, line_of
from patchkit.errors import DriftError


class CMakeSyntaxError(DriftError):
    """The text is not CMake; the message starts with ``path:line``."""


class Argument(NamedTuple):
    """One argument, delimiters included; a paren among the arguments is one too."""

    start: int
    stop: int
    text: str
    line: int

    @property
    def value(self) -> str:
        """The text without its quotes or brackets, escapes left as they are."""
        opening, closing = _delimiters(self.text)
        stop = len(self.text) - len(closing)
        return self.text[len(opening) : stop]


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch of an if block.

    It is taken when ``condition`` holds and none of ``excluded``, the conditions of the earlier
    branches, does. ``condition`` is () in an else. The span is that of the whole block.
    """

    condition: tuple[str, ...]
    excluded: tuple[tuple[str, ...], ...]
    start: int
    stop: int


class Command(NamedTuple):
    """A call: the lower-cased name, the span from it to the closing paren, the branches around it.

    An if, elseif, else or endif lies outside of the branches that it delimits.
    """

    name: str
    line: int
    start: int
    stop: int
    arguments: tuple[Argument, ...]
    block: tuple[Branch, ...]

    @property
    def values(self) -> tuple[str, ...]:
        """Return the texts of the arguments."""
        return tuple(argument.value for argument in self.arguments)


# A $ is kept out of the runs because $(NAME) is the one way to have parens in an unquoted argument.
_WORD = r'[^ \0\t\r\n()#"\[=\\$]++|\$(?:\([A-Za-z0-9_]*\))?+|\\(?!\r?\n)[^\0]'
# unquoted_legacy of cmake-language(7): `-Da="b c"` is one argument, quotes and space included.
_QUOTED_PART = rf'"(?:{_WORD}|[ \t\[=])*+"'

# The order decides, since re takes the first alternative that matches: only a whole word is an
# identifier, `a-b` and `x=1` go on to be unquoted.
_PATTERNS = {
    "newline": r"\r?\n",
    "space": r"\A\ufeff|(?:[ \t]|\r(?!\n))++",
    "comment": r"#\[(?P<fence>=*)\[.*?\](?P=fence)\]|#(?!\[=*\[)(?:[^\0\r\n]++|\r(?!\n))*+",
    "quoted": r'"(?:[^"\\\0]++|\\[^\0])*+"',
    "bracket": r"\[(?P<bars>=*)\[.*?\](?P=bars)\]",
    "open": r"\(",
    "close": r"\)",
    "identifier": r"[A-Za-z_][A-Za-z0-9_]*+(?=[ \t\r\n()#]|\Z)",
    "unquoted": rf"(?!\[=*\[)(?:{_WORD}|[\[=])(?:{_WORD}|[\[=]|{_QUOTED_PART})*+",
    "invalid": r".",
}
_TOKEN = re.compile("|".join(f"(?P<{k}>{p})" for k, p in _PATTERNS.items()), re.DOTALL)
# A newline right behind the opening bracket is no part of the value (cmake-language(7)).
_BRACKET_OPENING = re.compile(r"(\[=*\[)(?:\r?\n)?")
# An escaped semicolon is a character of its item.
_SEPARATOR = re.compile(r"(?<!\\);")
_TRAILING_SEPARATORS = re.compile(r"(?<!\\);+\Z")

_BLANK = frozenset({"space", "newline", "comment"})
_BLOCKS = frozenset({"if", "function", "macro", "foreach", "while", "block"})


def tokenize(text: str, path: str = "<cmake>") -> Iterator[re.Match[str]]:
    """Yield tokens, whose groups join to the text again; ``lastgroup`` is a token's kind.

    Kinds: space (a BOM too), newline, comment, quoted, bracket, open, close, identifier, unquoted.
    Raises CMakeSyntaxError.
    """
    for token in _TOKEN.finditer(text):
        if token.lastgroup == "invalid":
            line = line_of(text, token.start())
            problem = f"{token[0]!r} begins nothing that ends"
            raise _error(path, line, problem)

        yield token


def commands(text: str, path: str = "<cmake>") -> list[Command]:
    """Return all commands in order. Raises CMakeSyntaxError, also for blocks that do not nest."""
    calls = list(_calls(text, path))
    stops = _block_stops(calls, path)
    branches: list[Branch] = []
    placed: list[Command] = []
    for call in calls:
        former = None
        if call.name in {"elseif", "else", "endif"}:
            former = branches.pop()
        placed.append(call._replace(block=tuple(branches)))

        values = call.values
        if call.name == "if":
            stop = stops[call.start]
            branches.append(Branch(values, (), call.start, stop))
        elif former and call.name != "endif":
            following = replace(
                former,
                condition=values if call.name == "elseif" else (),
                excluded=(*former.excluded, former.condition),
            )
            branches.append(following)
    return placed


def list_items(argument: Argument) -> list[str]:
    r"""Return the items of a ;-list, empty ones dropped; ``\;`` does not separate."""
    return [item for item in _SEPARATOR.split(argument.value) if item]


def add_list_item(
    argument: Argument,
    item: str,
    *,
    path: str,
    note: str,
) -> Edit:
    """Append an item to a ;-list, inside its quotes or brackets."""
    opening, closing = _delimiters(argument.text)
    if not list_items(argument):
        text = f"{opening}{item}{closing}"
        return Edit(path, argument.start, argument.stop, text, note)

    stop = argument.stop - len(closing)
    start = stop
    # Replacing a trailing ; instead of inserting after it lets splice see two such edits collide.
    if tail := _TRAILING_SEPARATORS.search(argument.value):
        start -= len(tail[0])
    return Edit(path, start, stop, f";{item}", note)


def remove_list_items(
    argument: Argument,
    drop: Callable[[str], bool],
    *,
    path: str,
    note: str,
) -> Edit:
    """Take the items for which ``drop`` holds out of a ;-list, which may leave it empty."""
    opening, closing = _delimiters(argument.text)
    items = _SEPARATOR.split(argument.value)
    value = ";".join(item for item in items if not (item and drop(item)))

    # An unquoted argument cannot be empty, and without it the later ones would move up.
    replacement = f"{opening}{value}{closing}" or '""'
    return Edit(path, argument.start, argument.stop, replacement, note)


def _delimiters(text: str) -> tuple[str, str]:
    if text.startswith('"'):
        return '"', '"'
    if opening := _BRACKET_OPENING.match(text):
        return opening[0], opening[1].replace("[", "]")
    return "", ""


def _calls(text: str, path: str) -> Iterator[Command]:
    """Yield the commands, each with an empty ``block``."""
    breaks = [match.start() for match in re.finditer("\n", text)]
    tokens = tokenize(text, path)
    is_fresh_line = True
    for name in tokens:
        if name.lastgroup in _BLANK:
            is_fresh_line = is_fresh_line or name.lastgroup == "newline"
            continue

        line = bisect_left(breaks, name.start()) + 1
        if name.lastgroup != "identifier" or not is_fresh_line:
            expected = "a command name" if is_fresh_line else "a newline"
            problem = f"expected {expected}, found {name.lastgroup} {name[0][:40]!r}"
            raise _error(path, line, problem)
        yield _read_call(name, tokens, line, breaks, path)
        is_fresh_line = False


def _read_call(
    name: re.Match[str],
    tokens: Iterator[re.Match[str]],
    line: int,
    breaks: Sequence[int],
    path: str,
) -> Command:
    """Return the command of a name, with the arguments that come from ``tokens``."""
    # CMake allows spaces in front of the paren, and neither a newline nor a comment.
    opening = next(tokens, None)
    while opening is not None and opening.lastgroup == "space":
        opening = next(tokens, None)
    if opening is None or opening.lastgroup != "open":
        raise _error(path, line, f'{name[0]} is not followed by "("')

    arguments: list[Argument] = []
    depth = 1
    for token in tokens:
        kind = token.lastgroup
        if kind == "open":
            depth += 1
        elif kind == "close":
            depth -= 1
        if depth == 0:
            return Command(
                name=name[0].lower(),
                line=line,
                start=name.start(),
                stop=token.end(),
                arguments=tuple(arguments),
                block=(),
            )
        if kind not in _BLANK:
            argument = Argument(
                start=token.start(),
                stop=token.end(),
                text=token[0],
                line=bisect_left(breaks, token.start()) + 1,
            )
            arguments.append(argument)
    raise _error(path, line, f"the parens of {name[0]} are never closed")


def _block_stops(calls: Sequence[Command], path: str) -> dict[int, int]:
    """Return where each block stops, by where it starts. Raises if blocks do not nest."""
    stops: dict[int, int] = {}
    # What opened the block, and the name of its latest branch.
    opened: list[tuple[Command, str]] = []
    for call in calls:
        opener, branch = opened[-1] if opened else (call, "")
        if call.name in _BLOCKS:
            opened.append((call, call.name))
        elif call.name in {"elseif", "else"}:
            if branch not in {"if", "elseif"}:
                raise _error(path, call.line, f"{call.name} without its if")
            opened[-1] = (opener, call.name)
        elif call.name.removeprefix("end") in _BLOCKS:
            if call.name != f"end{opener.name}":
                problem = f"{call.name} without its opening command"
                raise _error(path, call.line, problem)
            stops[opener.start] = call.stop
            opened.pop()

    if opened:
        opener, _branch = opened[-1]
        raise _error(path, opener.line, f"{opener.name} without its end{opener.name}")
    return stops


def _error(path: str, line: int, problem: str) -> CMakeSyntaxError:
    return CMakeSyntaxError(
        f"{path}:{line}: {problem}",
        why="CMake itself would refuse this file",
        hint="compare it with the one of the release",
    )
