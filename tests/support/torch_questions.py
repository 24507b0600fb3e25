"""Find in its files what the build of a release asks of torch, and ask that of a torch.

Asking are setup.py, the CMake files, and the Python files that both run. A question is a name in
torch's modules; branches that a build for CUDA never reaches are searched, too.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from patchkit.edit.cmake import commands
from patchkit.process import ask

# What only a build for ROCm asks: flags of hipcc, and what turns CUDA's sources into HIP's.
FOR_ROCM = ("torch.utils.hipify", "COMMON_HIPCC_FLAGS", "COMMON_HIP_FLAGS")
_PROGRAM = re.compile(r"\b(?:import|from)\s+torch\b")
_SCRIPT = re.compile(r"\$\{\w+\}/([\w./-]+\.py)")  # ${CMAKE_SOURCE_DIR}/cmake/hipify.py
_ASK = """\
import importlib, json, sys
def answered(question):
    value, path = importlib.import_module("torch"), "torch"
    try:
        for name in question.split(".")[1:]:
            path += f".{name}"
            if not hasattr(value, name):
                importlib.import_module(path)
            value = getattr(value, name)
        json.dumps(value)
    except (ImportError, AttributeError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    except TypeError:
        return {"kind": type(value).__name__}
    return {"value": value}
answer = [answered(each) for each in json.loads(sys.argv[1])]
"""


def questions(root: Path) -> set[str]:
    """Return what a tree asks of torch, as ``torch.version.cuda``; not what ROCm alone asks."""
    scripts, programs = {"setup.py"}, []
    for path in [root / "CMakeLists.txt", *sorted(root.glob("cmake/**/*.cmake"))]:
        for call in commands(path.read_text(encoding="utf-8"), str(path)):
            values = [
                re.sub(r"\\(.)", r"\1", argument.value) for argument in call.arguments
            ]
            if call.name == "append_cmake_prefix_path" and len(values) == 2:
                programs.append(
                    f"import {values[0]}; print({values[1]})"
                )  # as the macro has it
            elif call.name != "message":
                programs += filter(_PROGRAM.search, values)
            scripts.update(
                match[1] for value in values for match in _SCRIPT.finditer(value)
            )
    for name in scripts:
        if (root / name).is_file():  # others belong to what CMake fetches
            programs.append((root / name).read_text(encoding="utf-8"))
    found = {each for text in programs for each in _asked(ast.parse(text))}
    return {each for each in found if not any(name in each for name in FOR_ROCM)}


def _asked(tree: ast.AST) -> Iterator[str]:
    """Yield what a Python file asks of torch, by the names that its imports bind."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            bound |= {
                each.asname or each.name: f"{node.module}.{each.name}"
                for each in node.names
            }
        elif isinstance(node, ast.Import):
            bound |= {each.asname: each.name for each in node.names if each.asname}
            tops = (
                each.name.partition(".")[0] for each in node.names if not each.asname
            )
            bound |= {top: top for top in tops}
    yield from (each for each in bound.values() if each.partition(".")[0] == "torch")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            asked = ".".join([bound.get(first, ""), *rest])
            if asked.partition(".")[0] == "torch" and all(
                part.isidentifier() for part in rest
            ):
                yield asked


def answers(
    python: Path, asking: Collection[str], env: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return what the torch of an interpreter answers: a value, the kind of one, or why not.

    Raises HostError if the interpreter does not run.
    """
    listed = json.dumps(list(asking))
    return dict(zip(asking, ask(python, _ASK, listed, env=env), strict=True))
