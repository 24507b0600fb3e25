"""Which variables are secrets: by name, from recipes/env/secrets.toml."""

from __future__ import annotations

import re
import tomllib
from fnmatch import translate
from functools import cache
from typing import Any

from patchkit.paths import RECIPES

_ASSIGNED = re.compile(
    r"""(?<![A-Za-z0-9_])(?P<name>[A-Za-z0-9_]+)(?P<sign>["']?\s*[=:]\s*)(?P<value>\S.*)"""
)
_MASK = "(masked)"


@cache
def _known() -> dict[str, Any]:
    with (RECIPES / "env" / "secrets.toml").open("rb") as file:
        return tomllib.load(file)


def is_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret, in upper or lower case."""
    upper = name.upper()
    return upper not in _known()["except"] and _secrets().match(upper) is not None


@cache
def _secrets() -> re.Pattern[str]:
    """All patterns in one: files have hundreds of thousands of names."""
    return re.compile("|".join(map(translate, _known()["names"])))


def secret_file(name: str) -> str:
    """The variable that names a file with this secret in it; empty if there is none."""
    return str(_known()["files"].get(name, ""))


def masked(line: str) -> str:
    """A line of any env file or script, without the value of a secret that it sets."""
    for match in _ASSIGNED.finditer(line):
        if is_secret(match["name"]):
            return line[: match.start("value")] + _MASK
    return line
