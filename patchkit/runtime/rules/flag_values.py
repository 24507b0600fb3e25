"""Return the values that a flag of `vllm serve` takes: by the installed code, else by a table.

``recipes/env/flag_values.toml`` says where the code lists them, and what each release lists there.
Nothing is imported: a few files are parsed, those of the flags that are asked about.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from patchkit.errors import SourceError
from patchkit.paths import RECIPES
from patchkit.records import read_toml
from patchkit.runtime.rules.releases import within
from patchkit.runtime.rules.vllm_names import parsed

PLACE = RECIPES / "env" / "flag_values.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """A flag with fixed values. ``files`` of the package may define ``symbol``; the first counts.

    ``values`` are ``NAME`` or ``NAME RANGE``. Where ``capitals`` is false, they do not matter.
    """

    flag: str
    files: tuple[str, ...]
    symbol: str
    values: tuple[str, ...]
    capitals: bool = True

    def known(self, version: str) -> tuple[str, ...]:
        """Return what a release takes by the table, "" for any."""
        pairs = (value.partition(" ") for value in self.values)
        return tuple(name for name, _, bounds in pairs if not version or within(version, bounds))

    def read(self, home: Path) -> tuple[str, ...]:
        """Return what the package in ``home`` takes. Raises SourceError if no file lists it."""
        for place in (home / name for name in self.files):
            if place.is_file():
                names = tuple(listed(parsed(place), self.symbol))
                if names:
                    return names
        raise SourceError(
            f"{home}: {self.symbol} is in none of {', '.join(self.files)}",
            why=f"this vLLM lists the values of {self.flag} elsewhere",
            hint="leave --python out and give its release: --vllm X.Y.Z",
        )

    def has(self, value: str, names: tuple[str, ...]) -> bool:
        if self.capitals:
            return value in names
        return value.upper() in (name.upper() for name in names)


@dataclass(frozen=True, slots=True)
class _FlagValues:
    flag: tuple[Choices, ...]


@cache
def load_choices(place: Path = PLACE) -> tuple[Choices, ...]:
    """Return the flags with fixed values. Raises UsageError, with file and line."""
    return read_toml(_FlagValues, place).flag


def takes(flag: str, value: str, version: str, home: Path | None) -> bool:
    """Return whether a flag takes a value; one whose values are not listed takes any."""
    choices = next((each for each in load_choices() if each.flag == flag), None)
    if choices is None:
        return True
    names = choices.read(home) if home else choices.known(version)
    return choices.has(value, names)


def listed(tree: ast.Module, symbol: str) -> Iterator[str]:
    """Return the strings of ``symbol = Literal[...]``, the keys of a dict, an Enum's members."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _target_name(node.targets[0]) == symbol:
            yield from strings(node.value)
        elif isinstance(node, ast.ClassDef) and node.name == symbol:
            assigned = (each for each in node.body if isinstance(each, ast.Assign))
            yield from (_target_name(each.targets[0]) for each in assigned)


def strings(value: ast.expr) -> Iterator[str]:
    """Return the strings of a ``Literal[...]``, a list, a set or a dict's keys."""
    inside = value.slice if isinstance(value, ast.Subscript) else value
    # A Literal of one value has no tuple around it.
    listed = inside.keys if isinstance(inside, ast.Dict) else getattr(inside, "elts", [inside])
    for each in listed:
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def _target_name(target: ast.expr) -> str:
    return target.id if isinstance(target, ast.Name) else ""
