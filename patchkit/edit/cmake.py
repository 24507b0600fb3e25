"""Read CMake files as tokens and commands, and edit their lists; every other character stays.

The rules are those of CMake's own lexer (Source/LexerParser/cmListFileLexer.in.l): only LF and CRLF
end a line. A lone CR is blank space, and does not end a comment.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from patchkit.edit.splice import Edit, line_of
from patchkit.errors import DriftError
from patchkit.frozen import Texts


class CMakeSyntaxError(DriftError):
    """The text is not CMake; the message starts with ``path:line``."""


class Argument(NamedTuple):
    """One argument, with its delimiters. A paren among the arguments is an argument, too."""

    start: int
    stop: int
    text: str
    line: int

    @property
    def value(self) -> str:
        """Return the text without its quotes or brackets; escapes stay as they are."""
        opening, closing = _delimiters(self.text)
        stop = len(self.text) - len(closing)
        return self.text[len(opening) : stop]


class Branch(NamedTuple):
    """One branch of an if block.

    It is taken if its ``condition`` holds and none of the conditions of earlier branches, which are
    ``excluded``. The condition of an else is (). ``start`` is that of the whole block.
    """

    condition: Texts
    excluded: tuple[Texts, ...]
    start: int


class Command(NamedTuple):
    """A call of a command.

    ``name`` is in lower case. The span leads from the name to the closing paren. ``values`` are the
    texts of the arguments. ``block`` are the branches around the call, outer ones first; an if,
    elseif, else or endif is not in the branches that it begins or ends.
    """

    name: str
    line: int
    start: int
    stop: int
    arguments: tuple[Argument, ...]
    values: Texts
    block: tuple[Branch, ...]


Commands = tuple[Command, ...]


# The first class excludes $, since $(NAME) is the only way to have parens in an unquoted argument.
_WORD = r'[^ \0\t\r\n()#"\[=\\$]++|\$(?:\([A-Za-z0-9_]*\))?+|\\(?!\r?\n)[^\0]'
# unquoted_legacy of cmake-language(7): `-Da="b c"` is one argument, quotes and space included.
_QUOTED_PART = rf'"(?:{_WORD}|[ \t\[=])*+"'

# In this order, since re takes the first alternative that matches. Only a whole word is an
# identifier; `a-b` and `x=1` are unquoted arguments.
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
    """Yield the tokens of a text; ``lastgroup`` is the kind of a token. Joined, they are the text.

    Kinds: space (a BOM too), newline, comment, quoted, bracket, open, close, identifier, unquoted.
    Raises CMakeSyntaxError.
    """
    for token in _TOKEN.finditer(text):
        if token.lastgroup == "invalid":
            line = line_of(text, token.start())
            problem = f"{token[0]!r} begins nothing that ends"
            raise _error(path, line, problem)

        yield token


# Cached, since several fixes and proofs read the same build files.
@lru_cache
def commands(text: str, path: str = "<cmake>") -> Commands:
    """Return all commands in order.

    Raises CMakeSyntaxError, also if a block is not closed, or is closed by another command.
    """
    # The command that opened each block, and the name of its latest branch.
    opened: list[tuple[Command, str]] = []
    branches: list[Branch] = []
    placed: list[Command] = []
    for call in _calls(text, path):
        opener, latest = opened[-1] if opened else (call, "")
        former = None
        if call.name in _BLOCKS:
            opened.append((call, call.name))
        elif call.name in {"elseif", "else"}:
            if latest not in {"if", "elseif"}:
                raise _error(path, call.line, f"{call.name} without its if")
            opened[-1] = (opener, call.name)
            former = branches.pop()
        elif call.name.removeprefix("end") in _BLOCKS:
            if call.name != f"end{opener.name}":
                problem = f"{call.name} without its opening command"
                raise _error(path, call.line, problem)
            opened.pop()
            if call.name == "endif":
                branches.pop()

        placed.append(call._replace(block=tuple(branches)))
        if call.name in {"if", "elseif", "else"}:
            branches.append(_branch_of(call, former))

    if opened:
        opener, _latest = opened[-1]
        raise _error(path, opener.line, f"{opener.name} without its end{opener.name}")
    return tuple(placed)


def _branch_of(call: Command, former: Branch | None) -> Branch:
    """Return the branch that a call begins, after the branch ``former`` of the same block."""
    condition = () if call.name == "else" else call.values
    if former is None:
        return Branch(condition, (), call.start)
    return Branch(condition, (*former.excluded, former.condition), former.start)


def list_items(argument: Argument) -> list[str]:
    r"""Return the items of a ;-list that are not empty; ``\;`` does not separate items."""
    return [item for item in _SEPARATOR.split(argument.value) if item]


def add_list_item(
    argument: Argument,
    item: str,
    *,
    path: str,
    note: str,
) -> Edit:
    """Return the edit that appends an item to a ;-list, inside its quotes or brackets."""
    opening, closing = _delimiters(argument.text)
    if not list_items(argument):
        text = f"{opening}{item}{closing}"
        return Edit(path, argument.start, argument.stop, text, note)

    stop = argument.stop - len(closing)
    start = stop
    # Replace a trailing ; rather than insert after it, so that splice refuses two such edits.
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
    """Return the edit that removes the items of a ;-list for which ``drop`` holds, maybe all."""
    opening, closing = _delimiters(argument.text)
    items = _SEPARATOR.split(argument.value)
    value = ";".join(item for item in items if not (item and drop(item)))

    # An unquoted argument cannot be empty: write "", so that later arguments keep their places.
    replacement = f"{opening}{value}{closing}" or '""'
    return Edit(path, argument.start, argument.stop, replacement, note)


def _delimiters(text: str) -> tuple[str, str]:
    if text.startswith('"'):
        return '"', '"'
    if opening := _BRACKET_OPENING.match(text):
        return opening[0], opening[1].replace("[", "]")
    return "", ""


def _calls(text: str, path: str) -> Iterator[Command]:
    """Yield the commands of a CMake file in order; ``block`` is empty, for the caller to fill in.

    Raises CMakeSyntaxError if a line begins with no command, or holds two.
    """
    breaks = [match.start() for match in re.finditer("\n", text)]
    tokens = tokenize(text, path)
    is_fresh_line = True
    for token in tokens:
        if token.lastgroup in _BLANK:
            is_fresh_line = is_fresh_line or token.lastgroup == "newline"
            continue

        line = bisect_left(breaks, token.start()) + 1
        if token.lastgroup != "identifier" or not is_fresh_line:
            expected = "a command name" if is_fresh_line else "a newline"
            problem = f"expected {expected}, found {token.lastgroup} {token[0][:40]!r}"
            raise _error(path, line, problem)
        yield _read_call(token, tokens, line, breaks, path)
        is_fresh_line = False


def _read_call(
    name: re.Match[str],
    tokens: Iterator[re.Match[str]],
    line: int,
    breaks: Sequence[int],
    path: str,
) -> Command:
    """Return the command with this name; read its arguments from ``tokens``.

    Raises CMakeSyntaxError if the parens are missing or not closed.
    """
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
                values=tuple(argument.value for argument in arguments),
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


def _error(path: str, line: int, problem: str) -> CMakeSyntaxError:
    return CMakeSyntaxError(
        f"{path}:{line}: {problem}",
        why="CMake itself would refuse this file",
        hint="compare it with the one of the release",
    )
