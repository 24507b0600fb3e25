"""Recognise variables that are secrets or run code: recipes/env/secrets.toml, code.toml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase, translate
from functools import cache

from patchkit.paths import RECIPES
from patchkit.records import read_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretForms:
    """How secrets are found in texts: regular expressions."""

    names: tuple[str, ...]
    exceptions: tuple[str, ...] = field(metadata={"key": "except"})
    tokens: tuple[str, ...]
    readable: tuple[str, ...]
    prose: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretNames:
    """What recipes/env/secrets.toml holds."""

    names: tuple[str, ...]
    exceptions: frozenset[str] = field(metadata={"key": "except"})
    flags: tuple[str, ...]
    files: Mapping[str, str]
    texts: SecretForms


@dataclass(frozen=True, slots=True, kw_only=True)
class _CodeNames:
    names: tuple[str, ...]
    exceptions: frozenset[str] = field(default=frozenset(), metadata={"key": "except"})
    reason: str
    source: str


@cache
def secret_names() -> SecretNames:
    """Return what is known of secrets."""
    return read_toml(SecretNames, RECIPES / "env" / "secrets.toml")


@cache
def _secret_pattern() -> re.Pattern[str]:
    """Return all patterns of secrets in one: files have hundreds of thousands of names."""
    return re.compile("|".join(map(translate, secret_names().names)))


def is_secret(name: str) -> bool:
    """Return whether a variable of this name holds a secret, in upper or lower case."""
    upper = name.upper()
    return upper not in secret_names().exceptions and _secret_pattern().match(upper) is not None


def secret_file(name: str) -> str:
    """Return the variable that names a file with this secret in it; empty if there is none."""
    return secret_names().files.get(name, "")


def secret_flag(word: str) -> str:
    """Return the flag of `vllm serve` that a word gives a secret, as its parser reads it; or ""."""
    name = re.split(r"[=.]", word, maxsplit=1)[0].replace("_", "-")
    # A shorter beginning is that of other flags, too: vLLM refuses it.
    known = (flag for flag in secret_names().flags if len(name) > 5 and flag.startswith(name))
    return next(known, "")


@cache
def _code_names() -> tuple[_CodeNames, ...]:
    return read_toml(tuple[_CodeNames, ...], RECIPES / "env" / "code.toml", key="code")


def runs_code(name: str) -> str:
    """Return how a variable of this name runs code; empty if it is not known to."""
    for row in _code_names():
        if name not in row.exceptions and any(fnmatchcase(name, form) for form in row.names):
            return row.reason
    return ""
