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
from patchkit.reading import parse_python

if TYPE_CHECKING:
    # libcst takes longer to import than a whole `patchkit status`, which parses nothing.
    import libcst as cst

_SHELL = "class _:\n"  # makes an indented function a module of its own

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def swap(
    path: str, text: str, scope: str, before: str, after: str, *, note: str
) -> list[Edit]:
    """Return the edit that turns ``before`` into ``after`` in ``scope``; ``[]`` if it is done.

    Raises DriftError unless exactly one of the two is found, exactly once.
    """
    definition = _find_definition(path, text, scope)
    node = ast.Module([definition], [])
    kept = _count_matches(
        ast.parse(_dedent_code(after)), before
    )  # an insertion keeps what it is put beside
    done = _count_matches(node, after)
    # The standard parser answers here, so a tree that is patched already needs no libcst.
    if done == 1 and _count_matches(node, before) == kept:
        return []
    lines = text.split("\n")
    begin = sum(len(line) + 1 for line in lines[: definition.lineno - 1])
    segment = "\n".join(lines[definition.lineno - 1 : definition.end_lineno]) + "\n"
    spans = _find_matches(begin, segment, before)
    if len(spans) == 1 and not done:
        start, stop = spans[0]
        column = start - (text.rfind("\n", 0, start) + 1)
        ours = textwrap.indent(_dedent_code(after), " " * column).strip()
        return [Edit(path, start, stop, ours, note)]
    found = spans, _find_matches(begin, segment, after)
    spots, there = ([first for first, _stop in each] for each in found)
    raise drift(path, text, before, spots, there, scope, begin)


def wrap(
    path: str, text: str, scope: str, before: str, after: str, using: str, *, note: str
) -> list[Edit]:
    """Return ``swap`` where ``after`` calls ``using``, a new function that is put before ``scope``.

    Raises DriftError as ``swap`` does, if the name is taken by other code, or if only one half of
    the two is there.
    """
    (ours,) = ast.parse(_dedent_code(using)).body
    assert isinstance(ours, Definition)
    swapped = swap(path, text, scope, before, after, note=note)
    body = parsed(path, text).body
    taken = [
        node for node in body if isinstance(node, Definition) and node.name == ours.name
    ]
    if taken and ast.dump(taken[0]) != ast.dump(ours):
        spot = _definition_start(text, taken[0])
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
    start = _definition_start(text, _find_definition(path, text, scope.split(".")[0]))
    return [Edit(path, start, start, f"{_dedent_code(using)}\n\n", note), *swapped]


def _definition_start(text: str, node: Definition) -> int:
    # lineno is the line of def or class, below the decorators.
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    # Not splitlines: Python's line numbers count neither form feeds nor Unicode's separators.
    return sum(len(line) + 1 for line in text.split("\n")[: first - 1])


def _count_matches(node: ast.AST, code: str) -> int:
    """Count how often code occurs in a piece of syntax: quicker than finding where."""
    pattern = ast.parse(_dedent_code(code)).body
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
    return sum(
        [*map(type, run)] == kinds and [*map(ast.dump, run)] == dumps for run in runs
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


def _find_matches(start: int, segment: str, code: str) -> list[tuple[int, int]]:
    """Return the spans of the file (code points) that equal ``code`` structurally.

    The segment, which begins at ``start``, is all that libcst is given of the file.
    """
    import libcst as cst
    from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

    shell = _SHELL if segment[:1] in " \t" else ""
    source = shell + segment
    # The copy guards against nodes that stand in a tree twice, which a parsed module never has.
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    pattern: list[cst.CSTNode] = list(cst.parse_module(_dedent_code(code)).body)
    nodes = list(_walk_nodes(wrapper.module))
    runs: list[list[cst.CSTNode]] = [
        list(node.body[first : first + len(pattern)])
        for node in nodes
        if isinstance(node, cst.Module | cst.IndentedBlock)
        for first in range(len(node.body) - len(pattern) + 1)
    ]
    match pattern:
        case [cst.SimpleStatementLine(body=[cst.Expr(value=expression)])]:
            pattern, runs = [expression], [[node] for node in nodes]
    # ast.dump is the comparison, so that quotes, parens and blank space do not count. Kinds are
    # much cheaper to compare than statements that are written out.
    wanted, kinds = _syntax_shape(code), [_node_kind(node) for node in pattern]
    code_for = cst.Module(body=[]).code_for_node
    positions = wrapper.resolve(ByteSpanPositionProvider)
    data, shift = source.encode(), start - len(shell)
    spans = [
        (positions[run[0]].start, positions[run[-1]].start + positions[run[-1]].length)
        for run in runs
        if [*map(_node_kind, run)] == kinds
        and _syntax_shape("".join(map(code_for, run))) == wanted
    ]
    # libcst counts bytes of UTF-8, and an Edit code points.
    return [
        (len(data[:first].decode()) + shift, len(data[:stop].decode()) + shift)
        for first, stop in spans
    ]


def _node_kind(node: cst.CSTNode) -> tuple[type, ...]:
    """Return the kind of a node, for a line of statements that of each."""
    import libcst as cst

    parts = node.body if isinstance(node, cst.SimpleStatementLine) else ()
    return type(node), *map(type, parts)


def _walk_nodes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _walk_nodes(child)


def _syntax_shape(code: str) -> str | None:
    try:
        return ast.dump(ast.parse(_dedent_code(code)))
    except SyntaxError:
        return None


def _dedent_code(code: str) -> str:
    return textwrap.dedent(code).strip() + "\n"
