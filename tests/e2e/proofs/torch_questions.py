"""Find in its files what the build of a release asks of torch, and ask that of a torch.

Asking are setup.py, the CMake files in their own words for Python, and the Python files that both
run. A question is an import, or an expression as it stands there, with the imports that it needs;
branches and functions that a build for CUDA never reaches are searched, too.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchkit.edit.cmake import commands
from patchkit.process import ask

# What only a build for ROCm asks: flags of hipcc, and what turns CUDA's sources into HIP's.
FOR_ROCM = frozenset({"get_hip_file_path", "hipify", "t.COMMON_HIPCC_FLAGS", "t.COMMON_HIP_FLAGS"})
_IMPORT = re.compile(r"\b(?:import|from)\s+torch\b")
_SCRIPT = re.compile(r"\$\{\w+\}/([\w./-]+\.py)")  # ${CMAKE_SOURCE_DIR}/cmake/hipify.py
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ASK = """\
import json, sys
def answered(imports, expression):
    names = {}
    try:
        exec(imports, names)
        value = eval(expression, names)
        json.dumps(value)
    except (ImportError, AttributeError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    except TypeError:
        return {"kind": type(value).__name__}
    return {"value": value}
answer = [answered(*each) for each in json.loads(sys.argv[1])]
"""


@dataclass(frozen=True, slots=True, order=True)
class Question:
    """An expression, and the imports that bind its names: one statement after the other."""

    expression: str
    imports: str


def questions(root: Path) -> dict[Question, str]:
    """Return what a tree asks of torch, and where: ``cmake/utils.cmake:98``, the first place."""
    found: dict[Question, str] = {}
    scripts = {"setup.py"}
    for path in [root / "CMakeLists.txt", *sorted(root.glob("cmake/**/*.cmake"))]:
        name = str(path.relative_to(root))
        for code, line in _programs(path.read_text(encoding="utf-8"), name, scripts):
            for question, _ in asked(ast.parse(code)):
                found.setdefault(question, f"{name}:{line}")
    for name in sorted(scripts):
        if (root / name).is_file():  # others belong to what CMake fetches
            for question, line in asked(ast.parse((root / name).read_text(encoding="utf-8"))):
                found.setdefault(question, f"{name}:{line}")
    return found


def _programs(text: str, path: str, scripts: set[str]) -> Iterator[tuple[str, int]]:
    """Yield the Python text of a CMake file that speaks of torch; collect names of files."""
    for call in commands(text, path):
        values = [_ESCAPE.sub(r"\1", argument.value) for argument in call.arguments]
        if call.name == "append_cmake_prefix_path" and len(values) == 2:
            # As the macro of cmake/utils.cmake has it.
            yield f"import {values[0]}; print({values[1]})", call.line
        for value in values:
            if call.name != "message" and _IMPORT.search(value):
                yield value, call.line
            scripts.update(match[1] for match in _SCRIPT.finditer(value))


def asked(tree: ast.AST) -> Iterator[tuple[Question, int]]:
    """Yield the questions of a Python file to torch, texts in it that are programs included."""
    bound: dict[str, list[str]] = {}  # name → the imports that bind it
    uses: list[tuple[str, str, int]] = []  # expression, its first name, line
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name, statement in _bindings(node):
                bound.setdefault(name, []).append(statement)
                uses.append((name, name, node.lineno))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            uses.append((ast.unparse(_whole(node, above)), node.id, node.lineno))
        elif isinstance(node, ast.Constant) and _IMPORT.search(str(node.value)):
            yield from ((question, node.lineno) for question in _inside(str(node.value)))
    for expression, name, line in uses:
        if name in bound:
            yield Question(expression, "\n".join(dict.fromkeys(bound[name]))), line


def _bindings(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yield the names that an import takes from torch, each with a statement for it alone."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            module, alone = node.module or "", ast.ImportFrom(node.module, [alias], node.level)
            name = alias.asname or alias.name
        else:
            module, alone = alias.name, ast.Import([alias])
            name = alias.asname or alias.name.partition(".")[0]
        if module.partition(".")[0] == "torch":
            yield name, ast.unparse(alone)


def _whole(node: ast.expr, above: Mapping[ast.AST, ast.AST]) -> ast.expr:
    """Return the longest expression around a name: its attributes, and calls with literals."""
    parent = above.get(node)
    if isinstance(parent, ast.Attribute):
        return _whole(parent, above)
    if isinstance(parent, ast.Call) and parent.func is node:
        given = [*parent.args, *(keyword.value for keyword in parent.keywords)]
        if all(isinstance(each, ast.Constant) for each in given):
            return _whole(parent, above)
    return node


def _inside(text: str) -> Iterator[Question]:
    try:
        program = ast.parse(text)
    except SyntaxError:
        return  # a sentence
    yield from (question for question, _ in asked(program))


def answers(
    python: Path, asking: Collection[Question], env: Mapping[str, str]
) -> dict[Question, Any]:
    """Return what the torch of an interpreter answers: a value, the kind of one, or why not.

    Raises HostError if the interpreter does not run.
    """
    listed = json.dumps([[each.imports, each.expression] for each in asking])
    return dict(zip(asking, ask(python, _ASK, listed, env=env), strict=True))
