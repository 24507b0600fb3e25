"""Read the files of the target's torch, and refuse by name what this stand-in lacks."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

# …/site-packages/torch of the target, as the installation wrote it beside this file.
TORCH = Path(os.fsdecode(Path(__file__).with_name("target").read_bytes()))


def literals(path: str) -> dict[str, Any]:
    """Return what a file assigns at its top level, for example ``version.py``: literals alone."""
    return dict(_literals(_statements(path)))


def returned(path: str, function: str) -> Any:
    """Return the literal that a function of a file returns, whatever it is called with.

    Raises AttributeError, with its name, if the function is not there or returns no literal.
    """
    for node in _statements(path):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            last = node.body[-1]
            if isinstance(last, ast.Return) and isinstance(last.value, ast.Constant):
                return last.value.value
    raise AttributeError(f"{TORCH / path} has no function {function} that returns a literal")


def refuse_the_rest(module: str) -> None:
    """Refuse by its name whatever a module of this package does not have."""

    def refuse(name: str) -> NoReturn:
        raise AttributeError(_lacking(f"{module}.{name}"), name=name, obj=sys.modules[module])

    there = vars(sys.modules[module])
    there["__getattr__"] = refuse
    # As a package it is asked for modules, too: else `from torch.version import name` is refused by
    # Python itself, in other words.
    there.setdefault("__path__", [])


class _Refusing:
    def find_spec(self, name: str, *_: object) -> None:
        """Raise ImportError for modules of the package; Python asks here last."""
        if name.startswith(f"{__package__}."):
            # No ModuleNotFoundError: `from torch import name` would hide the words of that.
            raise ImportError(_lacking(name), name=name)


sys.meta_path.append(_Refusing())


def _lacking(name: str) -> str:
    return (
        f"{name} is not in the stand-in for {TORCH}: a build for another CPU has of torch only "
        "what vLLM's setup.py and CMake ask for; leave out what asks for more, or build there"
    )


def _statements(path: str) -> list[ast.stmt]:
    return ast.parse((TORCH / path).read_bytes(), filename=str(TORCH / path)).body


def _literals(statements: list[ast.stmt]) -> Iterator[tuple[str, Any]]:
    for node in statements:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=expression):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as expression):
                pass
            case _:
                continue
        with suppress(ValueError):  # any other expression is for torch itself to evaluate
            yield name, ast.literal_eval(expression)
