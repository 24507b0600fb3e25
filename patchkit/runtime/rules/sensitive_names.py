"""Names of variables that are secrets, or that run code: recipes/env/secrets.toml and code.toml."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatchcase, translate
from functools import cache
from typing import Any

from patchkit.paths import RECIPES

_ASSIGNED = re.compile(
    r"""(?<![A-Za-z0-9_])(?P<name>[A-Za-z0-9_]+)(?P<sign>["']?\s*[=:]\s*)(?P<value>\S.*)"""
)
_MASK = "(masked)"


@cache
def _table(file: str) -> dict[str, Any]:
    return tomllib.loads((RECIPES / "env" / file).read_text(encoding="utf-8"))


def is_secret(name: str) -> bool:
    """Return whether a variable of this name holds a secret, in upper or lower case."""
    upper = name.upper()
    return upper not in _table("secrets.toml")["except"] and _secrets().match(upper) is not None


@cache
def _secrets() -> re.Pattern[str]:
    """Return all patterns in one: files have hundreds of thousands of names."""
    return re.compile("|".join(map(translate, _table("secrets.toml")["names"])))


def secret_file(name: str) -> str:
    """Return the variable that names a file with this secret in it; empty if there is none."""
    return str(_table("secrets.toml")["files"].get(name, ""))


def masked(line: str) -> str:
    """Return a line of any env file or script without the value of a secret that it sets."""
    for match in _ASSIGNED.finditer(line):
        if is_secret(match["name"]):
            return line[: match.start("value")] + _MASK
    return line


def runs_code(name: str) -> str:
    """Return how a variable of this name runs code; empty if it is not known to."""
    for row in _table("code.toml")["code"]:
        if name not in row.get("except", ()) and any(fnmatchcase(name, p) for p in row["names"]):
            return str(row["reason"])
    return ""
