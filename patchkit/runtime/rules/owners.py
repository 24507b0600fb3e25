"""Return whose a name is that only looks like vLLM's or NCCL's: recipes/env/owners.toml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import translate
from functools import cache

from patchkit.paths import RECIPES
from patchkit.records import read_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class NameOwner:
    """Who sets or reads some names, by patterns in which ``*`` is any text."""

    names: tuple[str, ...]
    of: str
    source: str


@cache
def _owners() -> tuple[tuple[re.Pattern[str], str], ...]:
    owners = read_toml(dict[str, tuple[NameOwner, ...]], RECIPES / "env" / "owners.toml")["owner"]
    return tuple((re.compile("|".join(map(translate, each.names))), each.of) for each in owners)


def owner(name: str) -> str:
    """Return who else reads or sets a name; empty if that is not known."""
    return next((of for pattern, of in _owners() if pattern.match(name)), "")
