"""Read Python: what it puts into os.environ and hands to programs that it starts."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator

from patchkit.runtime.files.collected import Collected
from patchkit.runtime.files.content import How
from patchkit.runtime.files.value import Value, known, unknown
from patchkit.runtime.shell.programs import Place, Programs
from patchkit.runtime.shell.script import FileReader, read_shell

_MAPS = ("env", "env_vars")
_STARTS = {"run", "Popen", "call", "check_call", "check_output", "system", "execvp", "execv"}


def read_python(text: str, found: Collected, files: FileReader | None = None) -> None:
    """Add what a program says; what its syntax hides stays unknown."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes that Python warns of are the author's
            tree = ast.parse(text)
            nodes = list(_by_block(tree))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1  # Python counts CR as a line as well
        found.problem(
            min(line, text.count("\n") + 1), "the file, which is not of this version of Python"
        )
        return
    except (RecursionError, MemoryError):
        found.problem(1, "the file, which is nested too deeply")
        return
    programs = Programs(found, lambda value, place: read_shell(value, place, found, files=files))
    for node, block in nodes:
        for name, value in _variables(node):
            found.set(name, _value(value), value.lineno, How.CODE, block)
        if isinstance(node, ast.Call) and _last_name(node.func) in _STARTS and node.args:
            _started(node.args[0], Place(line=node.lineno, block=block), programs, found, files)


def _by_block(tree: ast.Module) -> Iterator[tuple[ast.AST, int]]:
    """Yield all nodes, each with the line where its function or its branch begins, 0 outside."""
    todo: list[tuple[ast.AST, int]] = [(tree, 0)]
    while todo:
        node, block = todo.pop()
        yield node, block
        for _, field in ast.iter_fields(node):
            if isinstance(field, ast.AST):
                todo.append((field, block))
            elif isinstance(field, list):
                is_body = bool(field) and isinstance(field[0], ast.stmt) and node is not tree
                inside = field[0].lineno if is_body else block
                todo += ((each, inside) for each in field if isinstance(each, ast.AST))


def _variables(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield what a node sets: os.environ["X"] = v, environ.setdefault, {"X": v} of environments."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if _is_environment(target):
                yield from _pairs(node.value)
            elif isinstance(target, ast.Subscript) and _is_environment(target.value):
                yield _text(target.slice), node.value
        return
    named: list[tuple[str | None, ast.expr]] = []
    if isinstance(node, ast.Dict):
        named += _pairs(node)
    elif isinstance(node, ast.Call):
        named += [(each.arg, each.value) for each in node.keywords]
        if isinstance(node.func, ast.Attribute) and _is_environment(node.func.value):
            yield from _changed(node.func.attr, node.args)
    for name, value in named:
        if name in _MAPS:
            yield from _pairs(value)


def _changed(method: str, arguments: list[ast.expr]) -> Iterator[tuple[str, ast.expr]]:
    if method == "setdefault" and len(arguments) == 2:
        yield _text(arguments[0]), arguments[1]
    elif method == "update" and arguments:
        yield from _pairs(arguments[0])


def _pairs(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                yield _text(key), value


def _is_environment(node: ast.expr) -> bool:
    return _last_name(node) in ("environ", "environment", *_MAPS)


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _value(node: ast.expr) -> Value:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return known(node.value, node.lineno)
    return unknown("…", node.lineno, "Python computes it")


def _started(
    node: ast.expr, place: Place, programs: Programs, found: Collected, files: FileReader | None
) -> None:
    """Read the command of subprocess.run and its kin: a list of words, or a text for a shell."""
    if isinstance(node, ast.List | ast.Tuple):
        programs.run([_value(each) for each in node.elts], place)
    elif text := _text(node):
        read_shell(known(text, node.lineno), place, found, files=files)
