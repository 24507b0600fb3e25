"""Edit Python files: replace a piece of code that is found by its syntax tree.

``before`` and ``after`` are snippets: one expression, or one or more statements. Syntax trees are
compared, so formatting and comments do not matter; only the matched span is replaced. A scope is
the function to search, ``function`` or ``Class.method``. The standard parser finds the scope, since
it is much faster than libcst, which then parses that function alone.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from patchkit.edit.splice import Edit, Edits
from patchkit.edit.text import HINT, absent, drift
from patchkit.errors import DriftError
from patchkit.reading import parse_python

if TYPE_CHECKING:
    # libcst takes longer to import than a whole `patchkit fixes`, which parses nothing.
    import libcst as cst
    from libcst.metadata import CodeSpan

_SHELL = "class _:\n"  # makes an indented function a module of its own

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
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
    kept = _equal_runs(_spans_by_node(_dedent_code(after)), before)
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
    """Return the spans of a definition whose syntax tree equals that of ``code``."""
    start = _line_offset(text, definition.lineno)
    stop = _line_offset(text, (definition.end_lineno or 0) + 1)
    segment = text[start:stop].rstrip("\n") + "\n"
    shell = _SHELL if segment[:1] in " \t" else ""
    source = shell + segment
    positions = _spans_by_node(source)

    # libcst counts bytes of UTF-8; an Edit counts code points.
    data = source.encode()
    shift = start - len(shell)
    spans = []
    for run in _equal_runs(positions, code):
        first = positions[run[0]]
        last = positions[run[-1]]
        begin = len(data[: first.start].decode())
        end = len(data[: last.start + last.length].decode())
        spans.append((begin + shift, end + shift))
    return sorted(spans)


def span_of(text: str, first: ast.stmt, last: ast.stmt) -> Span:
    """Return the span from the first statement to the last."""
    start = _place_offset(text, first.lineno, first.col_offset)
    return start, _place_offset(text, last.end_lineno or 0, last.end_col_offset or 0)


# Cached, since `swap` looks for two pieces of code in one scope.
@lru_cache(maxsize=16)
def _spans_by_node(code: str) -> Mapping[cst.CSTNode, CodeSpan]:
    """Return every node of the syntax tree of ``code``, with its span in bytes."""
    import libcst as cst
    from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

    # libcst copies a tree in case a node is in it twice, which a parsed module never has.
    wrapper = MetadataWrapper(cst.parse_module(code), unsafe_skip_copy=True)
    return wrapper.resolve(ByteSpanPositionProvider)


def _equal_runs(nodes: Iterable[cst.CSTNode], code: str) -> list[Sequence[cst.CSTNode]]:
    """Return each run of nodes that equals ``code``: one expression, or consecutive statements."""
    import libcst as cst

    pattern: Sequence[cst.CSTNode] = cst.parse_module(_dedent_code(code)).body
    runs: list[Sequence[cst.CSTNode]] = []
    match pattern:
        case [cst.SimpleStatementLine(body=[cst.Expr(value=expression)])]:
            pattern = [expression]
            runs += ([node] for node in nodes)
        case _:
            for node in nodes:
                if isinstance(node, cst.Module | cst.IndentedBlock):
                    starts = range(len(node.body) - len(pattern) + 1)
                    runs += (node.body[i : i + len(pattern)] for i in starts)

    # Shapes by ast.dump ignore quotes, parentheses and blank space. The kinds of nodes are compared
    # first, which is much cheaper.
    kinds = list(map(type, pattern))
    alike = (run for run in runs if list(map(type, run)) == kinds)
    shape = _syntax_shape(code)
    written = cst.Module(body=[]).code_for_node
    return [run for run in alike if _syntax_shape("".join(map(written, run))) == shape]


def _syntax_shape(code: str) -> str | None:
    try:
        return ast.dump(ast.parse(_dedent_code(code)))
    except SyntaxError:
        return None


def _definition_start(text: str, node: Definition) -> int:
    # lineno is the line of def or class, below the decorators.
    nodes = [node, *node.decorator_list]
    return _line_offset(text, min(part.lineno for part in nodes))


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
