"""Recognise variables that are secrets or run code: recipes/env/secrets.toml, code.toml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase, translate
from functools import cache

from patchkit.paths import RECIPES
from patchkit.records import read_toml

_ASSIGNED = re.compile(
    r"""(?<![A-Za-z0-9_])(?P<name>[A-Za-z0-9_]+)(?P<sign>["']?\s*[=:]\s*)(?P<value>\S.*)"""
)
_MASK = "(masked)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _SecretNames:
    names: tuple[str, ...]
    exceptions: frozenset[str] = field(metadata={"key": "except"})
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _CodeNames:
    names: tuple[str, ...]
    exceptions: frozenset[str] = field(default=frozenset(), metadata={"key": "except"})
    reason: str
    source: str


@cache
def _secret_names() -> _SecretNames:
    return read_toml(_SecretNames, RECIPES / "env" / "secrets.toml")


@cache
def _patterns() -> re.Pattern[str]:
    """Return all patterns of secrets in one: files have hundreds of thousands of names."""
    return re.compile("|".join(map(translate, _secret_names().names)))


@cache
def _code_names() -> tuple[_CodeNames, ...]:
    return read_toml(dict[str, tuple[_CodeNames, ...]], RECIPES / "env" / "code.toml")["code"]


def is_secret(name: str) -> bool:
    """Return whether a variable of this name holds a secret, in upper or lower case."""
    upper = name.upper()
    return upper not in _secret_names().exceptions and _patterns().match(upper) is not None


def secret_forms() -> tuple[str, ...]:
    """Return the names of secrets; ``*`` stands for any text."""
    return _secret_names().names


def secret_file(name: str) -> str:
    """Return the variable that names a file with this secret in it; empty if there is none."""
    return _secret_names().files.get(name, "")


def masked(line: str) -> str:
    """Return a line of any env file or script without the value of a secret that it sets."""
    for match in _ASSIGNED.finditer(line):
        if is_secret(match["name"]):
            # To the end of the line: a secret may hold blanks, quotes and further = signs.
            return line[: match.start("value")] + _MASK
    return line


def runs_code(name: str) -> str:
    """Return how a variable of this name runs code; empty if it is not known to."""
    for each in _code_names():
        if name not in each.exceptions and any(fnmatchcase(name, form) for form in each.names):
            return each.reason
    return ""
