"""Edits of Python files: swap code that is structurally known for code that is structurally known.

``before`` and ``after`` are snippets: one expression, or one or more statements. They are compared
by syntax tree, so formatting and comments do not matter; only the matched span is replaced.
A scope names the function to look in, ``function`` or ``Class.method``.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Sequence
from functools import lru_cache

from patchkit.edit.splice import Edit
from patchkit.edit.text import HINT, absent, drift
from patchkit.errors import DriftError
from patchkit.reading import parse_python

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Run = Sequence[ast.AST]
"""One expression, or statements that follow each other."""


def swap(
    path: str,
    text: str,
    scope: str,
    before: str,
    after: str,
    *,
    note: str,
) -> list[Edit]:
    """Return the edit that turns ``before`` into ``after`` in ``scope``; ``[]`` if it is done.

    Raises DriftError unless exactly one of the two is found, exactly once.
    """
    definition = _find_definition(path, text, scope)
    module = ast.Module([definition], [])
    spans = _find_spans(text, module, before)
    done = _find_spans(text, module, after)

    # An insertion keeps what it is put beside.
    inserted_beside = _find_runs(ast.parse(_dedent_code(after)), before)
    if len(done) == 1 and len(spans) == len(inserted_beside):
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
        _offset_of(text, definition.lineno),
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
) -> list[Edit]:
    """Return ``swap`` where ``after`` calls ``using``, a new function that is put before ``scope``.

    Raises DriftError as ``swap`` does, if the name is taken by other code, or if only one half of
    the two is there.
    """
    code = _dedent_code(using)
    (helper,) = ast.parse(code).body
    assert isinstance(helper, Definition)
    swapped = swap(path, text, scope, before, after, note=note)

    body = parsed(path, text).body
    present = _named(body, helper.name)[:1]
    for definition in present:
        if ast.dump(definition) != ast.dump(helper):
            spot = _definition_start(text, definition)
            raise drift(path, text, f"def {helper.name}", [spot], scope="another form")

    if present and swapped:
        raise _half_wrapped(path, f"definition of {helper.name}", "call")
    if not present and not swapped:
        raise _half_wrapped(path, f"call of {helper.name}", "definition")
    if present:
        return []

    outer = _find_definition(path, text, scope.split(".")[0])
    start = _definition_start(text, outer)
    insertion = Edit(path, start, start, f"{code}\n\n", note)
    return [insertion, *swapped]


def _half_wrapped(path: str, present: str, missing: str) -> DriftError:
    return DriftError(
        f"{path}: the {present} is there, its {missing} is not",
        why="the file was edited by hand, or is half patched",
        hint=HINT,
    )


@lru_cache(maxsize=16)
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


def _find_spans(text: str, node: ast.AST, code: str) -> list[tuple[int, int]]:
    return [_span_of(text, run) for run in _find_runs(node, code)]


def _find_runs(node: ast.AST, code: str) -> list[Run]:
    """Return the pieces of a syntax tree that equal ``code`` structurally."""
    pattern: Run = ast.parse(_dedent_code(code)).body
    runs = _statement_runs(node, len(pattern))
    match pattern:
        case [ast.Expr(value=expression)]:
            pattern = [expression]
            runs = ([part] for part in _walk(node))

    # Kinds are much cheaper to compare than statements that are written out.
    kinds = list(map(type, pattern))
    alike = (run for run in runs if list(map(type, run)) == kinds)
    dumps = list(map(ast.dump, pattern))
    return [run for run in alike if list(map(ast.dump, run)) == dumps]


def _statement_runs(node: ast.AST, length: int) -> Iterator[Run]:
    """Yield every ``length`` statements that follow each other in a block."""
    for part in _walk(node):
        for _name, block in ast.iter_fields(part):
            if not isinstance(block, list) or not block:
                continue
            if isinstance(block[0], ast.stmt):
                for start in range(len(block) - length + 1):
                    yield block[start : start + length]


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it, but for the parts of f-strings.

    Python before 3.12 does not know where these are.
    """
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from _walk(child)


def _span_of(text: str, run: Run) -> tuple[int, int]:
    """Return the span of a run in code points."""
    first = run[0]
    last = run[-1]
    assert isinstance(first, ast.stmt | ast.expr)
    assert isinstance(last, ast.stmt | ast.expr)
    line = first.lineno
    if isinstance(first, Definition):
        line = _first_line(first)

    start = _offset_of(text, line, first.col_offset)
    stop = _offset_of(text, last.end_lineno or 1, last.end_col_offset or 0)
    return start, stop


def _definition_start(text: str, node: Definition) -> int:
    return _offset_of(text, _first_line(node))


def _first_line(node: Definition) -> int:
    # lineno is the line of def or class, below the decorators.
    nodes = [node, *node.decorator_list]
    return min(part.lineno for part in nodes)


def _offset_of(text: str, line: int, column: int = 0) -> int:
    """Return the offset in code points; Python counts columns in bytes of UTF-8."""
    # Not splitlines: Python's line numbers count neither form feeds nor Unicode's separators.
    lines = text.split("\n")[:line]
    row = lines.pop()
    before = row.encode()[:column].decode()
    return sum(len(line) + 1 for line in lines) + len(before)


def _dedent_code(code: str) -> str:
    return textwrap.dedent(code).strip() + "\n"
