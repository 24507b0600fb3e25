"""Count how densely Python is written: decisions, tokens, air and names.

The figures are those of the table ``[air]`` in tools/budget.toml:

=================  ==================================================================
over_10            functions with more than 10 decisions, in per cent
over_15, over_20   functions with more than 15, or 20, decisions
decisions          decisions per line of a function's body
tokens             tokens per line of code
parallel           assignments ``a, b = x, y`` per 1,000 lines of code
splats             literal splats ``*(x, y)`` per 1,000 lines of code
blank              blank lines inside functions, in per cent of the bodies' lines
pronouns           names out of a list of pronouns and participles, in per cent of names stored
weight             tokens of all code
=================  ==================================================================

A decision is an ``if``, ``for``, ``while``, ``except``, ``assert``, conditional expression,
comprehension, ``case``, and each further operand of ``and`` or ``or``. A function has one more,
and those of the functions inside it. A body's lines are all lines after the docstring, blank
ones and comments, too. A line of code is neither blank nor comment nor docstring.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.IfExp,
    ast.ExceptHandler,
    ast.comprehension,
    ast.match_case,
    ast.Assert,
)
_WORDS = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


@dataclass(frozen=True)
class Function:
    """A function of a module, with what it decides."""

    place: str  # path:name
    decisions: int


@dataclass
class Counts:
    """What was counted in some modules."""

    functions: list[Function] = field(default_factory=list)
    choices: int = 0  # decisions beyond the one that each function has
    body_lines: int = 0
    blank_lines: int = 0
    code_lines: int = 0
    tokens: int = 0
    parallel: int = 0
    splats: int = 0
    names: Counter[str] = field(default_factory=Counter)

    def figures(self, pronouns: Iterable[str]) -> dict[str, float]:
        """Return the figures of the table, rounded as it has them."""
        named_so = sum(self.names[pronoun] for pronoun in pronouns)
        return {
            "over_10": _share(self._over(10), len(self.functions), 100, 1),
            "over_15": self._over(15),
            "over_20": self._over(20),
            "decisions": _share(self.choices, self.body_lines, 1, 3),
            "tokens": _share(self.tokens, self.code_lines, 1, 2),
            "parallel": _share(self.parallel, self.code_lines, 1000, 1),
            "splats": _share(self.splats, self.code_lines, 1000, 1),
            "blank": _share(self.blank_lines, self.body_lines, 100, 1),
            "pronouns": _share(named_so, self.names.total(), 100, 1),
            "weight": self.tokens,
        }

    def _over(self, decisions: int) -> int:
        return sum(function.decisions > decisions for function in self.functions)


def count_modules(paths: Iterable[Path], home: Path) -> Counts:
    """Count the modules of these paths; places are named from ``home``."""
    counts = Counts()
    for path in paths:
        _count_module(
            counts, path.read_text(encoding="utf-8"), str(path.relative_to(home))
        )
    return counts


def _share(count: int, whole: int, per: int, digits: int) -> float:
    return round(per * count / max(1, whole), digits)


def _count_module(counts: Counts, text: str, name: str) -> None:
    tree = ast.parse(text)
    lines = text.splitlines()
    docstrings = set(_docstring_lines(tree))

    for number, line in enumerate(lines, 1):
        is_comment = line.strip().startswith("#")
        if line.strip() and not is_comment and number not in docstrings:
            counts.code_lines += 1

    for token in _whole_tokens(text):
        if token.type in _WORDS and token.start[0] not in docstrings:
            counts.tokens += 1

    for node in ast.walk(tree):
        _count_node(counts, node)

    for function in _functions(tree):
        place = f"{name}:{function.name}"
        counts.functions.append(Function(place, count_decisions(function)))

    for function in _outer_functions(tree):
        body = [
            lines[number - 1]
            for number in range(function.lineno, (function.end_lineno or 0) + 1)
            if number not in docstrings
        ]
        counts.body_lines += len(body)
        counts.blank_lines += sum(not line.strip() for line in body)
        counts.choices += count_decisions(function) - 1


def _whole_tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    """Yield tokens, an f-string as one: from Python 3.12 on its parts are tokens, too."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]
        if name == "FSTRING_START":
            depth += 1
            if depth == 1:
                yield token._replace(type=tokenize.STRING)
        elif name == "FSTRING_END":
            depth -= 1
        elif not depth:
            yield token


def count_decisions(function: ast.AST) -> int:
    """Return the decisions of a function, with those of the functions inside it."""
    decisions = 1
    for node in ast.walk(function):
        if isinstance(node, _BRANCHES):
            decisions += 1
        elif isinstance(node, ast.BoolOp):
            decisions += len(node.values) - 1
    return decisions


def _count_node(counts: Counts, node: ast.AST) -> None:
    match node:
        case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple()):
            counts.parallel += 1
        case ast.Starred(value=ast.Tuple(elts=[_, *_]) | ast.List(elts=[_, *_])):
            counts.splats += 1
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            counts.names[name.strip("_")] += 1


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.Module(body=[first, *_]) | ast.ClassDef(body=[first, *_]):
                pass
            case (
                ast.FunctionDef(body=[first, *_])
                | ast.AsyncFunctionDef(body=[first, *_])
            ):
                pass
            case _:
                continue
        match first:
            case ast.Expr(value=ast.Constant(value=str())):
                yield from range(first.lineno, (first.end_lineno or 0) + 1)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _outer_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions that stand in no other function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        else:
            yield from _outer_functions(node)
