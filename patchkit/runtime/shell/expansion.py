"""Expand words of a shell script, as tree-sitter parses them, as far as their text is known."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from patchkit.runtime.files.collected import Collected
from patchkit.runtime.files.value import MappedText, Piece, Value, known, split, unknown
from patchkit.runtime.shell.scope import Scope
from patchkit.runtime.shell.syntax import commands_in, parse, words_in

if TYPE_CHECKING:
    from tree_sitter import Node

_DEEPEST = 20  # ${A:-"${B:-…}"}
_MOST_FOLLOWED = 4 << 20  # characters that variables may stand for in one file
_EXPANSIONS = {
    "simple_expansion",
    "expansion",
    "command_substitution",
    "arithmetic_expansion",
    "process_substitution",
}
_ESCAPED = re.compile(r"\\([^\n])")
_QUOTED = re.compile(r'\\([$`"\\])')
_HEREDOC = re.compile(r"\\([$`\\])")
_ANSI = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
_LEADING = re.compile(rb"\s+")
_ALL = ("$@", "$*")
# Also ${NAME[@]+"${NAME[@]}"} and ${NAME[@]:-}: the same, where set -u dislikes an empty array.
_WHOLE_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\](?::?\+\"?\$\{\1\[[@*]\]\}\"?|:?-)?\}")
_ARGUMENT = "it is an argument"
_OPERATORS = {"-", ":-", "=", ":=", "?", ":?", "+", ":+"}


class Expansions:
    """Expand the words of one parsed text; ``run`` reads the commands in ``$(…)``."""

    def __init__(self, found: Collected, run: Callable[[Node], None]) -> None:
        self.scope = Scope()
        self._found, self._run = found, run
        self._left = _MOST_FOLLOWED
        self._depth = 0

    def words(self, node: Node, source: MappedText) -> list[Value]:
        """Return an argument as the words that it becomes."""
        array = self._array(node, source)
        if array is not None:
            return list(array)
        return list(split(self._parts(node, source)))

    def value(self, node: Node, source: MappedText) -> Value:
        """Return a word as one text, as in an assignment."""
        if node.type == "array":
            nodes = [each for each in node.named_children if each.type != "comment"]
            items = [word for each in nodes for word in self.words(each, source)]
            return Value(items=tuple(items))
        pieces = [piece for value, _ in self._parts(node, source) for piece in value.pieces]
        return Value(tuple(pieces)) if pieces else known("", source.line(node.start_byte))

    def document(self, node: Node, source: MappedText, *, plain: bool, tabs: bool) -> Value:
        """Return the text of a here-document; ``plain`` if its end was quoted."""
        start, end = node.start_byte, node.end_byte
        if plain:
            value = known(source.text(start, end), source.line(start))
        else:
            value = Value(tuple(self._between(node, source, start, end, _HEREDOC)))
        if not tabs:
            return value
        pieces = (
            Piece(re.sub(r"(?m)^\t+", "", piece.text), piece.line, piece.why, piece.default)
            for piece in value.pieces
        )
        return Value(tuple(pieces))

    def _parts(self, node: Node, source: MappedText) -> Iterator[tuple[Value, bool]]:
        """Yield the parts of a word, and whether blanks in a part end the word."""
        line = source.line(node.start_byte)
        text = source.text(node.start_byte, node.end_byte)
        if self._depth > _DEEPEST:
            yield unknown(text, line, "it is nested too deeply"), False
            return
        self._depth += 1
        try:
            if node.type in ("command_name", "concatenation", "translated_string"):
                end = node.start_byte
                for child in node.named_children:
                    blanks = _LEADING.match(source.data, end)
                    if child.type in _EXPANSIONS and blanks:
                        yield known(source.text(*blanks.span()), line), True
                    yield from self._parts(child, source)
                    end = child.end_byte
            elif node.type in _EXPANSIONS:
                yield self._expansion(node, source), True
            elif node.type == "string":
                inside = self._between(
                    node,
                    source,
                    node.start_byte + 1,
                    max(node.start_byte + 1, node.end_byte - 1),
                    _QUOTED,
                )
                yield Value(tuple(inside)) if inside else known("", line), False
            elif node.type == "raw_string":
                yield known(text[1:-1], line), False
            elif node.type == "ansi_c_string":
                ansi = re.sub(r"\\(.)", lambda each: _ANSI.get(each[1], each[0]), text[2:-1])
                yield known(ansi, line), False
            elif node.child_count and node.type != "word":
                yield unknown(text, line, "it is no plain text"), False
            else:
                yield Value(tuple(_unescaped(text, line, _ESCAPED))), False
        finally:
            self._depth -= 1

    def _between(
        self, node: Node, source: MappedText, start: int, end: int, escapes: re.Pattern[str]
    ) -> list[Piece]:
        """Return a text in which variables and commands stand, without escapes."""
        pieces: list[Piece] = []

        def plain(until: int) -> None:
            if start < until:
                pieces.extend(_unescaped(source.text(start, until), source.line(start), escapes))

        for child in node.named_children:
            if child.type in _EXPANSIONS:
                # The parser counts blanks between two variables to the second one.
                blanks = _LEADING.match(source.data, child.start_byte)
                plain(blanks.end() if blanks else child.start_byte)
                pieces += self._expansion(child, source).pieces
                start = child.end_byte
        plain(end)
        return pieces

    def _array(self, node: Node, source: MappedText) -> tuple[Value, ...] | None:
        """Return the words of ``"${NAME[@]}"`` alone, if the array is known."""
        while node.type in ("string", "command_name") and node.named_child_count == 1:
            node = node.named_children[0]
        if node.type == "simple_expansion":
            text = source.text(node.start_byte, node.end_byte)
            line = source.line(node.start_byte)
            return (unknown(text, line, _ARGUMENT, several=True),) if text in _ALL else None
        match = _WHOLE_ARRAY.fullmatch(source.text(node.start_byte, node.end_byte).lstrip())
        if node.type != "expansion" or not match:
            return None
        value = self.scope.get(match[1])
        if value is None or value.items is None:
            line = source.line(node.start_byte)
            return (unknown(match[0], line, f"{match[1]} is not set here", several=True),)
        return value.items if self._pays(value) else None

    def _expansion(self, node: Node, source: MappedText) -> Value:
        written = source.text(node.start_byte, node.end_byte).lstrip()
        line = source.line(node.start_byte)
        if node.type == "simple_expansion":
            return self._variable(written[1:], written, line)
        if node.type != "expansion":
            if node.type != "arithmetic_expansion":
                self._run(node)
            return unknown(written, line, "it is the output of a command")
        children = node.children[1:-1]  # without the braces
        if not children or children[0].type not in ("variable_name", "special_variable_name"):
            return unknown(written, line, "it is computed")
        name = source.text(children[0].start_byte, children[0].end_byte)
        if len(children) == 1:
            return self._variable(name, written, line)
        operator = source.text(children[1].start_byte, children[1].end_byte)
        if operator not in _OPERATORS:
            return unknown(written, line, f"it is computed from {name}")
        words = [self.value(each, source) for each in children[2:]]
        word = words[0] if words else known("", line)
        return self._conditional(name, operator, word, written, line)

    def _conditional(self, name: str, operator: str, word: Value, written: str, line: int) -> Value:
        """Expand ``${NAME:-word}`` and its kin."""
        if operator.endswith("+"):
            return unknown(written, line, f"it depends on {name}")
        found = self.scope.get(name)
        if operator.endswith(("-", "=")):
            self._found.default(name, word)
            if found is None or (found.why and word.text and not word.why) or _is_empty(found):
                value = word.as_default()
                if operator.endswith("="):
                    self.scope.set(name, value)
                return value
        return self._variable(name, written, line)

    def _variable(self, name: str, written: str, line: int) -> Value:
        value = self.scope.get(name)
        if value is None:
            is_own = name.isidentifier()
            why = f"{name} is not set in this file" if is_own else _ARGUMENT
            return unknown(written, line, why)
        if value.items is not None:
            value = value.items[0] if value.items else known("", line)
        if value.why and (len(value.pieces) == 1 or not self._pays(value)):
            return unknown(written, line, value.why)
        if not self._pays(value):
            return unknown(written, line, f"{name} is too long to follow")
        return value

    def _pays(self, value: Value) -> bool:
        """Return whether a variable may still be followed: a file must not grow without end."""
        self._left -= value.size + 1
        return self._left > 0


def words_of(text: Value, found: Collected) -> list[Value]:
    """Return the words of the first command in a text."""
    source = MappedText(text)
    expansions = Expansions(found, lambda _: None)
    command = next(commands_in(parse(source.data)), None)
    nodes = words_in(command) if command else ()
    return [word for node in nodes for word in expansions.words(node, source)]


def _unescaped(text: str, line: int, escapes: re.Pattern[str]) -> Iterator[Piece]:
    """Yield a text without escapes; behind a backslash and a line break another line begins."""
    if "\\" not in text:
        yield Piece(text, line)
        return
    for part in re.split(r"(?<!\\)\\\n", text):
        yield Piece(escapes.sub(r"\1", part), line)
        line += part.count("\n") + 1


def _is_empty(value: Value) -> bool:
    return not (value.why or value.text or value.items)
