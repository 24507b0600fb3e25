"""Edits of Python files: swap code that is structurally known for code that is structurally known.

``before`` and ``after`` are snippets: one expression, or one or more statements. They are compared
by syntax tree, so formatting and comments do not matter; only the matched span is replaced.
A scope names the function to look in, ``function`` or ``Class.method``.
"""

from __future__ import annotations

import ast
import textwrap
from functools import lru_cache

from patchkit.edit.splice import Edit
from patchkit.edit.text import HINT, absent, drift
from patchkit.errors import DriftError

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def swap(path: str, text: str, scope: str, before: str, after: str, *, note: str) -> list[Edit]:
    """Return the edit that turns ``before`` into ``after`` in ``scope``; ``[]`` if it is done.

    Raises DriftError unless exactly one of the two is found, exactly once.
    """
    node = _definition(path, text, scope)
    spans, done = _matches(text, [node], before), _matches(text, [node], after)
    ours = _normal(after)
    # An insertion keeps what it is put beside.
    if len(done) == 1 and len(spans) == len(_matches(ours, ast.parse(ours).body, before)):
        return []
    if len(spans) == 1 and not done:
        start, stop = spans[0]
        column = start - (text.rfind("\n", 0, start) + 1)
        return [Edit(path, start, stop, textwrap.indent(ours, " " * column).strip(), note)]
    spots, there = ([start for start, _stop in found] for found in (spans, done))
    raise drift(path, text, before, spots, there, scope, span(text, node)[0])


def wrap(
    path: str, text: str, scope: str, before: str, after: str, using: str, *, note: str
) -> list[Edit]:
    """Return ``swap`` where ``after`` calls ``using``, a new function that is put before ``scope``.

    Raises DriftError as ``swap`` does, if the name is taken by other code, or if only one half of
    the two is there.
    """
    (ours,) = ast.parse(_normal(using)).body
    assert isinstance(ours, Definition)
    swapped = swap(path, text, scope, before, after, note=note)
    body = parsed(path, text).body
    taken = [node for node in body if isinstance(node, Definition) and node.name == ours.name]
    if taken and ast.dump(taken[0]) != ast.dump(ours):
        spot = span(text, taken[0])[0]
        raise drift(path, text, f"def {ours.name}", [spot], scope="another form")
    if bool(taken) == bool(swapped):
        there, missing = ("definition", "call") if taken else ("call", "definition")
        raise DriftError(
            f"{path}: the {there} of {ours.name} is there, its {missing} is not",
            why="the file was edited by hand, or is half patched",
            hint=HINT,
        )
    if taken:
        return []
    owner = _definition(path, text, scope.split(".")[0])
    # A definition's own line is that of def or class, below the decorators.
    first = min([owner, *owner.decorator_list], key=lambda node: node.lineno)
    start = text.rfind("\n", 0, span(text, first)[0]) + 1
    return [Edit(path, start, start, f"{_normal(using)}\n\n", note), *swapped]


def span(text: str, node: ast.stmt | ast.expr) -> tuple[int, int]:
    """Return where a piece of syntax stands, in code points."""
    # Not splitlines: Python's line numbers count neither form feeds nor Unicode's separators.
    lines = text.split("\n")

    def offset(line: int, column: int) -> int:
        before = sum(len(line) + 1 for line in lines[: line - 1])
        return before + len(lines[line - 1].encode()[:column].decode())

    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)


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


def _matches(text: str, body: list[ast.stmt], code: str) -> list[tuple[int, int]]:
    """Return the spans below some statements that equal ``code`` structurally, in order."""
    pattern: list[ast.stmt] | list[ast.expr] = ast.parse(_normal(code)).body
    parts = list(ast.walk(ast.Module(body, [])))
    runs: list[list[ast.stmt]] | list[list[ast.expr]] = [
        block[start : start + len(pattern)]
        for part in parts
        for _name, block in ast.iter_fields(part)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt)
        for start in range(len(block) - len(pattern) + 1)
    ]
    if len(pattern) == 1 and isinstance(pattern[0], ast.Expr):
        pattern = [pattern[0].value]
        runs = [[part] for part in parts if isinstance(part, ast.expr)]
    # The dump is the comparison, so that quotes, parens and blank space do not count; kinds are
    # much cheaper to compare.
    kinds, dumps = [*map(type, pattern)], [*map(ast.dump, pattern)]
    return sorted(
        (span(text, run[0])[0], span(text, run[-1])[1])
        for run in runs
        if [*map(type, run)] == kinds and [*map(ast.dump, run)] == dumps
    )


def _normal(code: str) -> str:
    return textwrap.dedent(code).strip() + "\n"
