"""Parse shell scripts with tree-sitter, and find the commands in the tree."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

_HEREDOC = re.compile(rb"<<-?[ \t]*['\"\\]?(\w+)")
# Texts of ten thousand open quotes take the grammar a time that grows with their square.
_SECONDS = 5.0
_CHUNK = 1 << 16  # bytes
_ASCII = bytes(range(128)) + b"x" * 128
_MOST_HEREDOCS = 100  # different ends
ARGUMENTS = {
    "word",
    "number",
    "string",
    "raw_string",
    "ansi_c_string",
    "translated_string",
    "concatenation",
    "simple_expansion",
    "expansion",
    "command_substitution",
    "arithmetic_expansion",
    "process_substitution",
    "brace_expression",
}
"""Kinds of nodes that are words of a command."""


def parse(data: bytes) -> Node:
    """Return the tree of a script in UTF-8; what is no shell is in it as ERROR.

    Raises TimeoutError if that takes longer than any script that people write.
    """
    text, end = _parsable(data), time.monotonic() + _SECONDS

    def late(_offset: int, _has_error: bool) -> bool:
        return time.monotonic() > end

    parser = _parser()
    try:
        return parser.parse(
            lambda at, _point: text[at : at + _CHUNK], progress_callback=late
        ).root_node
    except ValueError:
        parser.reset()
        raise TimeoutError from None


def pipeline(node: Node | None) -> Iterator[Node]:
    """Yield the commands of a pipeline, or the statement itself."""
    if node is None:
        return
    if node.type == "pipeline":
        for child in node.named_children:
            yield from pipeline(child) if child.type == "pipeline" else (child,)
    else:
        yield node


def commands_in(node: Node, kind: str = "command") -> Iterator[Node]:
    """Yield all commands below a node; ``kind``: declaration_command for export and its kin."""
    todo = [node]
    while todo:
        each = todo.pop()
        if each.type == kind:
            yield each
        todo += reversed(each.named_children)


def words_in(command: Node) -> Iterator[Node]:
    """Yield the name of a command and its arguments."""
    for node in command.named_children:
        if node.type == "command_name" or node.type in ARGUMENTS:
            yield node


@cache
def _parser() -> Parser:
    # Imported here: a node that writes its env file parses no shell.
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


def _parsable(data: bytes) -> bytes:
    """Return a script of the same length that tree-sitter reads right.

    It takes a line that only begins with the end of a here-document for that end. It also asks
    C's isalpha about characters that are none of C's, which reads past a table and can crash: for
    the shell they are letters like any other.
    """
    data = data.translate(_ASCII)
    if b"<<" not in data:
        return data
    ends = dict.fromkeys(_HEREDOC.findall(data))
    for end in list(ends)[:_MOST_HEREDOCS]:
        longer = re.compile(rb"(?m)^(\t*)" + end[:1] + rb"(?=" + end[1:] + rb"[^\n])")
        data = longer.sub(rb"\1_", data)
    return data
