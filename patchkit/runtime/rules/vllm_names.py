"""Read the environment variables of a vLLM in its ``envs.py``, without importing it.

All releases have the dict ``environment_variables`` there: a name, and what reads it. Since 0.17
vLLM itself warns of each VLLM_* that is set and not in this dict ("Unknown vLLM environment
variable detected"), so the dict decides what is known, even where other files read a further name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from patchkit.errors import SourceError, StorageError, UsageError
from patchkit.reading import LARGEST_IN_TREE, read_bytes

_DICT = "environment_variables"
_READERS = ("getenv", "get")  # os.getenv, os.environ.get


def read_names(place: Path) -> dict[str, str]:
    """Return name → default of an ``envs.py``, empty where there is none. Raises SourceError.

    A default that is computed is given as the code has it.
    """
    return {
        name: _default_text(name, reader) for name, reader in readers(place, parsed(place)).items()
    }


def readers(place: Path, tree: ast.Module) -> dict[str, ast.expr]:
    """Return name → the code that reads it, of a parsed ``envs.py``. Raises SourceError."""
    found = {
        key.value: reader
        for table in map(_variables_dict, tree.body)
        if table is not None
        for key, reader in zip(table.keys, table.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    if not found:
        raise unread(place, f"has no dict {_DICT}")
    return found


def parsed(place: Path) -> ast.Module:
    """Return a file of vLLM as a syntax tree. Raises SourceError."""
    try:
        return ast.parse(read_bytes(place, limit=LARGEST_IN_TREE))
    except (UsageError, StorageError) as error:
        raise unread(place, error.what.removeprefix(f"{place}: ")) from None
    except (SyntaxError, ValueError) as error:
        raise unread(place, f"is not Python: {error}") from None


def unread(place: Path, what: str) -> SourceError:
    """Return the error for a file of vLLM that is not what all releases have."""
    return SourceError(
        f"{place}: {what}",
        why="vLLM is damaged, or newer than any release that patchkit knows",
        hint="install vLLM again, or name a release with --vllm, for example --vllm 0.25.1",
    )


def _variables_dict(node: ast.stmt) -> ast.Dict | None:
    # With or without an annotation, by release.
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    named = any(isinstance(each, ast.Name) and each.id == _DICT for each in targets)
    value = getattr(node, "value", None)
    return value if named and isinstance(value, ast.Dict) else None


def _default_text(name: str, reader: ast.expr) -> str:
    return next((_node_text(node) for node in _default_nodes(name, reader)), "")


def _default_nodes(name: str, reader: ast.expr) -> Iterator[ast.expr]:
    """Return what is taken where the variable is not set: the first one found counts."""
    for node in ast.walk(reader):
        if isinstance(node, ast.Call) and reads(node, name):
            yield from node.args[1:2] or [ast.Constant(None)]
        elif isinstance(node, ast.IfExp) and isinstance(node.test, ast.Compare):
            # X if NAME in os.environ else DEFAULT, or the other way round.
            if isinstance(node.test.ops[0], ast.In):
                yield node.orelse
            elif isinstance(node.test.ops[0], ast.NotIn):
                yield node.body


def reads(call: ast.Call, name: str) -> bool:
    """Return whether a call reads a name: ``getenv(NAME, …)``, ``env_with_choices(NAME, …)``."""
    function = call.func
    if not (call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value == name):
        return False
    if isinstance(function, ast.Attribute):
        return function.attr in _READERS
    return isinstance(function, ast.Name) and function.id.endswith("with_choices")


def _node_text(node: ast.expr) -> str:
    if not isinstance(node, ast.Constant):
        return "" if ast.unparse(node) == "[]" else ast.unparse(node)
    if node.value is None:
        return ""
    # vLLM's switches are written as 0 and 1 in the environment.
    return str(int(node.value)) if isinstance(node.value, bool) else str(node.value)
