"""Which variables run code when they are read: by name, from recipes/env/code.toml."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from patchkit.paths import RECIPES


@cache
def _rows() -> tuple[dict[str, Any], ...]:
    with (RECIPES / "env" / "code.toml").open("rb") as file:
        return tuple(tomllib.load(file)["code"])


def runs_code(name: str) -> str:
    """Return how a variable of this name runs code; empty if it is not known to."""
    for row in _rows():
        if name not in row.get("except", ()) and any(fnmatchcase(name, p) for p in row["names"]):
            return str(row["reason"])
    return ""
