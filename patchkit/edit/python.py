"""Edits of Python files: swap code that is structurally known for code that is structurally known.

``before`` and ``after`` are snippets: one expression, or one or more statements. They are compared
by syntax tree, so formatting and comments do not matter; only the matched span is replaced.
A scope names the function to look in, ``function`` or ``Class.method``. The standard parser finds
it in a large file much sooner than libcst, which then works on that function alone.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from patchkit.edit.splice import Edit
from patchkit.edit.text import HINT, absent, drift
from patchkit.errors import DriftError

if TYPE_CHECKING:
    # libcst takes longer to import than a whole `patchkit status`, which parses nothing.
    import libcst as cst

_SHELL = "class _:\n"  # makes an indented function a module of its own

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def swap(path: str, text: str, scope: str, before: str, after: str, *, note: str) -> list[Edit]:
    """Return the edit that turns ``before`` into ``after`` in ``scope``; ``[]`` if it is done.

    Raises DriftError unless exactly one of the two is found, exactly once.
    """
    node = ast.Module([_definition(path, text, scope)], [])
    kept = _count(ast.parse(_normal(after)), before)  # an insertion keeps what it is put beside
    # The standard parser answers here, so a tree that is patched already needs no libcst.
    if _count(node, after) == 1 and _count(node, before) == kept:
        return []
    segment = Segment(path, text, scope)
    spans, done = segment.matches(before), segment.matches(after)
    if len(spans) == 1 and not done:
        start, stop = spans[0]
        column = start - (text.rfind("\n", 0, start) + 1)
        ours = textwrap.indent(_normal(after), " " * column).strip()
        return [Edit(path, start, stop, ours, note)]
    spots = [start for start, _stop in spans]
    raise drift(path, text, before, spots, [start for start, _stop in done], scope, segment.start)


def define(path: str, text: str, code: str, *, before: str, note: str) -> list[Edit]:
    """Return the edit that puts a definition in front of another; ``[]`` if it is there already.

    Raises DriftError if ``before`` is not there, or the name is taken by other code.
    """
    name = _only(code).name
    taken = [n for n in parsed(path, text).body if isinstance(n, Definition) and n.name == name]
    if taken and ast.dump(taken[0]) != ast.dump(_only(code)):
        raise drift(path, text, f"def {name}", [_start(text, taken[0])], scope="another form")
    if taken:
        return []
    start = _start(text, _definition(path, text, before))
    return [Edit(path, start, start, f"{_normal(code)}\n\n", note)]


def wrap(
    path: str, text: str, scope: str, before: str, after: str, using: str, *, note: str
) -> list[Edit]:
    """Return ``swap`` where ``after`` calls ``using``, a new function that is put before ``scope``.

    Raises DriftError as both do, or if only one half of the two is there.
    """
    helper = define(path, text, using, before=scope.split(".")[0], note=note)
    swapped = swap(path, text, scope, before, after, note=note)
    if bool(helper) != bool(swapped):
        there, missing = ("call", "definition") if helper else ("definition", "call")
        raise DriftError(
            f"{path}: the {there} of {_only(using).name} is there, its {missing} is not",
            why="the file was edited by hand, or is half patched",
            hint=HINT,
        )
    return [*helper, *swapped]


def _only(code: str) -> Definition:
    node = ast.parse(_normal(code)).body[0]
    assert isinstance(node, Definition)
    return node


def _start(text: str, node: Definition) -> int:
    # lineno is the line of def or class, below the decorators.
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    # Not splitlines: Python's line numbers count neither form feeds nor Unicode's separators.
    return sum(len(line) + 1 for line in text.split("\n")[: first - 1])


def _count(node: ast.AST, code: str) -> int:
    """Count how often code occurs in a piece of syntax: quicker than finding where."""
    pattern = ast.parse(_normal(code)).body
    wanted: list[ast.AST] = [*pattern]
    runs: Iterator[list[ast.AST]] = (
        list(body[start : start + len(pattern)])
        for part in ast.walk(node)
        for _name, body in ast.iter_fields(part)
        if isinstance(body, list) and body and isinstance(body[0], ast.stmt)
        for start in range(len(body) - len(pattern) + 1)
    )
    if len(pattern) == 1 and isinstance(pattern[0], ast.Expr):
        wanted = [pattern[0].value]
        runs = ([part] for part in ast.walk(node))
    kinds, dumps = [*map(type, wanted)], [*map(ast.dump, wanted)]
    return sum([*map(type, run)] == kinds and [*map(ast.dump, run)] == dumps for run in runs)


class Segment:
    """One function or class of a file, as libcst sees it."""

    def __init__(self, path: str, text: str, scope: str) -> None:
        node = _definition(path, text, scope)
        lines = text.split("\n")
        self.start = sum(len(line) + 1 for line in lines[: node.lineno - 1])
        self.code = "\n".join(lines[node.lineno - 1 : node.end_lineno]) + "\n"

    def matches(self, code: str) -> list[tuple[int, int]]:
        """Return the spans of the file (code points) that equal ``code`` structurally."""
        shell = _SHELL if self.code[:1] in " \t" else ""
        shift = self.start - len(shell)
        return [(start + shift, stop + shift) for start, stop in _matches(shell + self.code, code)]


@lru_cache(maxsize=16)
def parsed(path: str, text: str) -> ast.Module:
    """Return the syntax tree of a file; do not change it. Raises DriftError, with the line."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise DriftError(
            f"{path}:{error.lineno}: not valid Python: {error.msg}",
            why="the file was edited by hand",
            hint=HINT,
        ) from None


def _definition(path: str, text: str, scope: str) -> Definition:
    body: list[ast.stmt] = parsed(path, text).body
    node: Definition | None = None
    for name in scope.split("."):
        named = [n for n in body if isinstance(n, Definition) and n.name == name]
        if not named:
            raise absent(f"{path}: 0 definitions of {scope}, expected 1")
        if len(named) > 1:
            raise DriftError(
                f"{path}: {len(named)} definitions of {scope}, expected 1",
                why="the file was edited by hand",
                hint=HINT,
            )
        node = named[0]
        body = node.body
    assert node is not None
    return node


def _matches(source: str, code: str) -> list[tuple[int, int]]:
    import libcst as cst
    from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

    # The copy guards against nodes that stand in a tree twice, which a parsed module never has.
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    pattern = cst.parse_module(_normal(code)).body
    expression = _expression(pattern[0]) if len(pattern) == 1 else None
    # ast.dump is the comparison, so that quotes, parens and blank space do not count.
    wanted = _shape(code)
    kinds = [_kind(node) for node in pattern]
    runs: Iterator[list[cst.CSTNode]] = (
        (run for run in _windows(wrapper.module, len(pattern)) if [*map(_kind, run)] == kinds)
        if expression is None
        else ([node] for node in _walk(wrapper.module) if type(node) is type(expression))
    )
    spans = wrapper.resolve(ByteSpanPositionProvider)
    code_for = cst.Module(body=[]).code_for_node
    found = [run for run in runs if _shape("".join(map(code_for, run))) == wanted]
    return [_span(source, spans[run[0]], spans[run[-1]]) for run in found]


def _span(source: str, first: object, last: object) -> tuple[int, int]:
    from libcst.metadata import CodeSpan

    assert isinstance(first, CodeSpan)
    assert isinstance(last, CodeSpan)
    start, stop = first.start, last.start + last.length
    # libcst counts bytes of UTF-8 and an Edit code points; in ASCII both are the same.
    if source.isascii():
        return start, stop
    data = source.encode()
    return len(data[:start].decode()), len(data[:stop].decode())


def _kind(node: cst.CSTNode) -> tuple[type, ...]:
    """Return the kind of a statement: much cheaper than writing the statement out to compare."""
    import libcst as cst

    parts = node.body if isinstance(node, cst.SimpleStatementLine) else ()
    return type(node), *map(type, parts)


def _walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _walk(child)


def _windows(module: cst.CSTNode, size: int) -> Iterator[list[cst.CSTNode]]:
    import libcst as cst

    for node in _walk(module):
        if isinstance(node, cst.Module | cst.IndentedBlock):
            for start in range(len(node.body) - size + 1):
                yield list(node.body[start : start + size])


def _expression(statement: cst.CSTNode) -> cst.BaseExpression | None:
    import libcst as cst

    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        only = statement.body[0]
        return only.value if isinstance(only, cst.Expr) else None
    return None


def _shape(code: str) -> str | None:
    try:
        return ast.dump(ast.parse(_normal(code)))
    except SyntaxError:
        return None


def _normal(code: str) -> str:
    return textwrap.dedent(code).strip() + "\n"
