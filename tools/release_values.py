"""Read which values variables and flags of a vLLM take, in its files, without importing it.

Three things in ``envs.py`` stop a vLLM that is started with another value: choices
(``env_with_choices`` and its kin), ``int(...)`` and ``float(...)`` around what is read. A type
alone (``Literal``) stops nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from patchkit.errors import SourceError
from patchkit.runtime.rules.presets import Choices
from patchkit.runtime.rules.variable_values import (
    INTEGER,
    NUMBER,
    ONE,
    SEVERAL,
    AllowedValues,
)
from patchkit.runtime.rules.vllm_names import parse_file, variable_readers

_CHOOSING = {"env_with_choices": ONE, "env_list_with_choices": SEVERAL}
_CHOOSING["env_set_with_choices"] = SEVERAL
_NUMBERS = {"int": INTEGER, "maybe_convert_int": INTEGER, "maybe_convert_bool": INTEGER}
_NUMBERS["float"] = NUMBER


def read_values(home: Path) -> dict[str, AllowedValues]:
    """Return name → values for the package in ``home``; names that take anything are left out.

    Raises SourceError for an ``envs.py`` that is none, or choices in a form that no release has.
    """
    place = home / "envs.py"
    found = {}
    for name, reader in variable_readers(place).items():
        if takes := next(_enforced_values(home, name, reader), None):
            found[name] = takes
    return found


def read_names(place: Path) -> dict[str, str]:
    """Return name → default of an ``envs.py``, as its code has it. Raises SourceError."""
    found = {}
    for name, reader in variable_readers(place).items():
        node = next(_default_nodes(name, reader), None)
        found[name] = (
            "" if node is None or ast.unparse(node) == "[]" else ast.unparse(node)
        )
        if isinstance(node, ast.Constant):
            # vLLM's switches are written as 0 and 1 in the environment.
            value = int(node.value) if isinstance(node.value, bool) else node.value
            found[name] = "" if value is None else str(value)
    return found


def _default_nodes(name: str, reader: ast.expr) -> Iterator[ast.expr]:
    """Yield what is taken where the variable is not set: the first one found counts."""
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
    if not (
        call.args
        and isinstance(call.args[0], ast.Constant)
        and call.args[0].value == name
    ):
        return False
    if isinstance(function, ast.Attribute):
        return function.attr in ("getenv", "get")  # os.getenv, os.environ.get
    return isinstance(function, ast.Name) and function.id.endswith("with_choices")


def read_choices(choices: Choices, home: Path) -> tuple[str, ...]:
    """Return the values of a flag that the package in ``home`` lists; none if no file does."""
    places = (home / name for name in choices.files)
    found = (
        listed(parse_file(place), choices.symbol) for place in places if place.is_file()
    )
    return next(filter(None, found), ())


def listed(tree: ast.Module, symbol: str) -> tuple[str, ...]:
    """Return the strings of ``symbol = Literal[...]``, the keys of a dict, an Enum's members.

    A Literal may have others in it, by their names.
    """
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == symbol:
            found += _strings(node.value)
            inner = (
                node.value.slice
                if isinstance(node.value, ast.Subscript)
                else node.value
            )
            for name in getattr(inner, "elts", ()):
                found += listed(tree, name.id) if isinstance(name, ast.Name) else ()
        elif isinstance(node, ast.ClassDef) and node.name == symbol:
            assigned = (row for row in node.body if isinstance(row, ast.Assign))
            found += (ast.unparse(row.targets[0]) for row in assigned)
    return tuple(found)


def _strings(value: ast.expr) -> Iterator[str]:
    """Yield the strings of a ``Literal[...]``, a list, a set or a dict's keys."""
    inside = value.slice if isinstance(value, ast.Subscript) else value
    # A Literal of one value has no tuple around it.
    items = (
        inside.keys
        if isinstance(inside, ast.Dict)
        else getattr(inside, "elts", [inside])
    )
    for item in items:
        if isinstance(item, ast.Constant) and isinstance(item.value, str):
            yield item.value


def _enforced_values(
    home: Path, name: str, reader: ast.expr
) -> Iterator[AllowedValues]:
    order = ("env_name", "default", "choices", "case_sensitive")
    for call in (node for node in ast.walk(reader) if isinstance(node, ast.Call)):
        function = call.func.id if isinstance(call.func, ast.Name) else ""
        if function in _CHOOSING and reads(call, name):
            keywords = {word.arg: word.value for word in call.keywords if word.arg}
            arguments = dict(zip(order, call.args, strict=False)) | keywords
            case = arguments.get("case_sensitive")
            yield AllowedValues(
                how=_CHOOSING[function],
                words=_choice_words(home, arguments["choices"]),
                any_case=isinstance(case, ast.Constant) and not case.value,
            )
        elif function in _NUMBERS and call.args and _is_read(call.args[0], name):
            yield AllowedValues(how=_NUMBERS[function])


def _is_read(node: ast.expr, name: str) -> bool:
    """Return whether an expression is ``os.getenv(NAME)``, ``os.environ[NAME]`` or the like."""
    if isinstance(node, ast.Call):
        return reads(node, name)
    return (
        isinstance(node, ast.Subscript) and ast.unparse(node) == f"os.environ[{name!r}]"
    )


def _choice_words(home: Path, choices: ast.expr) -> tuple[str, ...]:
    """Return a list of words, or the members of a class elsewhere in the package."""
    if isinstance(choices, ast.List):
        return tuple(_strings(choices))
    for node in ast.walk(choices):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
            call = node.value
            if ast.unparse(call.func) == "__import__" and isinstance(
                call.args[0], ast.Constant
            ):
                module = str(call.args[0].value).split(".")
                place = home.joinpath(*module[1:]).with_suffix(".py")
                if words := listed(parse_file(place), node.attr):
                    return words
    raise SourceError(
        f"{home / 'envs.py'}:{choices.lineno}: choices in an unknown form",
        why="this vLLM is newer than any release that patchkit knows",
        hint="name a release with --vllm, for example --vllm 0.25.1",
    )
