"""Edit Python files: replace a piece of code that is found by its syntax tree.

``before`` and ``after`` are snippets: one expression, or one or more statements. Syntax trees are
compared, so formatting and comments do not matter; only the matched span is replaced. A scope is
the function to search, ``function`` or ``Class.method``.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Sequence
from copy import copy

from patchkit.edit.splice import Edit, Edits
from patchkit.edit.text import HINT, absent, drift
from patchkit.errors import DriftError
from patchkit.reading import parse_python

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Located = ast.stmt | ast.expr
Span = tuple[int, int]
"""Start and end of a part of a text, in code points."""


def swap(
    path: str,
    text: str,
    scope: str,
    before: str,
    after: str,
    *,
    note: str,
) -> Edits:
    """Return the edit that turns ``before`` into ``after``; ``[]`` if ``scope`` has ``after``.

    Raises DriftError unless exactly one of ``before`` and ``after`` is found, and once; AbsentError
    if the scope is missing.
    """
    definition = _find_definition(path, text, scope)
    spans = _find_spans(text, definition, before)
    done = _find_spans(text, definition, after)
    # ``after`` contains ``before`` if it inserts code beside it.
    kept = _equal_runs(ast.parse(_dedent_code(after)).body, before)
    if len(done) == 1 and len(spans) == len(kept):
        return []

    if len(spans) == 1 and not done:
        start, stop = spans[0]
        line_start = text.rfind("\n", 0, start) + 1
        indent = " " * (start - line_start)
        replacement = textwrap.indent(_dedent_code(after), indent).strip()
        return [Edit(path, start, stop, replacement, note)]

    raise drift(
        path,
        text,
        before,
        [start for start, _stop in spans],
        [start for start, _stop in done],
        scope,
        _line_offset(text, definition.lineno),
    )


def wrap(
    path: str,
    text: str,
    scope: str,
    before: str,
    after: str,
    using: str,
    *,
    note: str,
) -> Edits:
    """Return the edits of ``swap``, and one that inserts the function ``using`` before ``scope``.

    ``using`` is the code of a new function, which ``after`` calls. Return ``[]`` if both edits are
    done. Raises as ``swap`` does; DriftError if other code has the name of the function, or if only
    one of the two edits is done.
    """
    code = _dedent_code(using)
    (helper,) = ast.parse(code).body
    assert isinstance(helper, Definition)
    swapped = swap(path, text, scope, before, after, note=note)

    body = parsed(path, text).body
    present = _named(body, helper.name)[:1]
    for definition in present:
        if ast.dump(definition) != ast.dump(helper):
            spot = _node_start(text, definition)
            raise drift(path, text, f"def {helper.name}", [spot], scope="another form")

    if present and swapped:
        raise _half_wrapped(path, f"definition of {helper.name}", "call")
    if not present and not swapped:
        raise _half_wrapped(path, f"call of {helper.name}", "definition")
    if present:
        return []

    outer = _find_definition(path, text, scope.split(".")[0])
    start = _node_start(text, outer)
    insertion = Edit(path, start, start, f"{code}\n\n", note)
    return [insertion, *swapped]


def _half_wrapped(path: str, present: str, missing: str) -> DriftError:
    return DriftError(
        f"{path}: the {present} is there, its {missing} is not",
        why="the file was edited by hand, or is half patched",
        hint=HINT,
    )


def parsed(path: str, text: str) -> ast.Module:
    """Return the syntax tree of a file; do not change it. Raises DriftError, with the line."""
    try:
        return parse_python(text)
    except SyntaxError as error:
        raise DriftError(
            f"{path}:{error.lineno or 1}: not valid Python: {error.msg}",
            why="the file was edited by hand, or a patch is wrong",
            hint=HINT,
        ) from None


def _find_definition(path: str, text: str, scope: str) -> Definition:
    body: list[ast.stmt] = parsed(path, text).body
    for name in scope.split("."):
        named = _named(body, name)
        if not named:
            raise absent(f"{path}: 0 definitions of {scope}, expected 1")

        if len(named) > 1:
            raise DriftError(
                f"{path}: {len(named)} definitions of {scope}, expected 1",
                why="the file was edited by hand",
                hint=HINT,
            )

        definition = named[0]
        body = definition.body
    return definition


def _named(body: Sequence[ast.stmt], name: str) -> list[Definition]:
    """Return the definitions of a name in a block."""
    definitions = (node for node in body if isinstance(node, Definition))
    return [node for node in definitions if node.name == name]


def _find_spans(text: str, definition: Definition, code: str) -> list[Span]:
    """Return the spans of a definition, without its decorators, that equal ``code``."""
    bare = copy(definition)
    bare.decorator_list = []
    runs = _equal_runs([bare], code)
    return sorted(span_of(text, run[0], run[-1]) for run in runs)


def span_of(text: str, first: _Located, last: _Located) -> Span:
    """Return the span from the first statement to the last, or that of an expression."""
    stop = _place_offset(text, last.end_lineno or 0, last.end_col_offset or 0)
    return _node_start(text, first), stop


def _equal_runs(body: Sequence[ast.stmt], code: str) -> list[Sequence[_Located]]:
    """Return each run of nodes in ``body`` that equals ``code``.

    It is one expression, or consecutive statements.
    """
    pattern: Sequence[_Located] = ast.parse(_dedent_code(code)).body
    nodes = [node for statement in body for node in ast.walk(statement)]
    runs: list[Sequence[_Located]] = []
    match pattern:
        case [ast.Expr(value=expression)]:
            pattern = [expression]
            runs += ([node] for node in nodes if isinstance(node, ast.expr))
        case _:
            for block in (body, *_blocks_in(nodes)):
                starts = range(len(block) - len(pattern) + 1)
                runs += (block[start : start + len(pattern)] for start in starts)

    # The kinds of nodes are compared first, which is much cheaper.
    kinds = list(map(type, pattern))
    alike = (run for run in runs if list(map(type, run)) == kinds)
    shape = list(map(ast.dump, pattern))
    return [run for run in alike if list(map(ast.dump, run)) == shape]


def _blocks_in(nodes: Sequence[ast.AST]) -> list[list[ast.stmt]]:
    """Return the lists of statements in nodes, except an elif, which is no statement by itself."""
    blocks = [
        (node, getattr(node, name, []))
        for node in nodes
        if not isinstance(node, ast.expr)  # the body of a lambda is no list
        for name in ("body", "orelse", "finalbody")
    ]
    return [block for node, block in blocks if not _is_elif(node, block)]


def _is_elif(node: ast.AST, block: Sequence[ast.stmt]) -> bool:
    match node, block:
        case ast.If(col_offset=column), [ast.If() as inner]:
            return inner.col_offset == column
    return False


def _node_start(text: str, node: _Located) -> int:
    """Return the offset at which a node begins, with its decorators."""
    # The place of a definition is that of def or class, below the decorators.
    parts = [node, *getattr(node, "decorator_list", [])]
    line = min(part.lineno for part in parts)
    return _place_offset(text, line, node.col_offset)


def _line_offset(text: str, line: int) -> int:
    """Return the offset at which a line begins, counted from 1."""
    # Not splitlines: Python's line numbers count neither form feeds nor Unicode's separators.
    return sum(len(row) + 1 for row in text.split("\n")[: line - 1])


def _place_offset(text: str, line: int, column: int) -> int:
    """Return the offset of a place in a syntax tree, whose columns count bytes of UTF-8."""
    row = text.split("\n")[line - 1].encode()
    return _line_offset(text, line) + len(row[:column].decode())


def _dedent_code(code: str) -> str:
    return textwrap.dedent(code).strip() + "\n"
