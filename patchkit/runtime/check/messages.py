"""Make findings with the words of recipes/env/findings.toml: an id, with what, why and next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from patchkit.finding import Finding, Level
from patchkit.paths import RECIPES
from patchkit.records import read_toml
from patchkit.runtime.check.content import Assignment, GivenFlag


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What is said of one kind of fault; names in braces are filled in."""

    level: Literal["error", "warning", "note"]
    what: str
    why: str = ""
    hint: str
    source: str = ""


@cache
def load_messages() -> Mapping[str, Message]:
    """Return the messages by id."""
    return read_toml(dict[str, Message], RECIPES / "env" / "findings.toml")


def make_finding(
    key: str, place: int | Assignment | GivenFlag, level: Level | None = None, **fields: object
) -> Finding:
    """Return a finding about a line, a variable or a flag; ``level`` instead of the table's."""
    message = load_messages()[key]
    line, about = (place, "") if isinstance(place, int) else (place.line, place.name)
    if not isinstance(place, int):
        fields = {"shown": place.shown, "name": about, **fields}
    return Finding(
        id=key,
        line=line,
        about=about,
        level=level or Level(message.level),
        what=message.what.format(**fields),
        why=message.why.format(**fields),
        hint=message.hint.format(**fields),
        source=message.source.format(**fields),
    )
