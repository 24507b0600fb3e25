"""Make findings with the words of recipes/env/findings.toml: an id, with what, why and next."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from patchkit.finding import Finding, Level
from patchkit.paths import RECIPES
from patchkit.records import read_toml
from patchkit.runtime.check.content import Assignment, GivenFlag


@cache
def load_messages() -> Mapping[str, Mapping[str, str]]:
    """Return the messages by id."""
    return read_toml(dict[str, dict[str, str]], RECIPES / "env" / "findings.toml")


def make_finding(
    key: str, place: int | Assignment | GivenFlag, level: Level | None = None, **fields: object
) -> Finding:
    """Return a finding about a line, a variable or a flag; ``level`` instead of the table's."""
    message = load_messages()[key]
    line, about = (place, "") if isinstance(place, int) else (place.line, place.name)
    if not isinstance(place, int):
        fields = {"shown": place.shown, "name": about, **fields}
    words = {part: text.format(**fields) for part, text in message.items() if part != "level"}
    return Finding(
        id=key,
        line=line,
        about=about,
        level=level or Level(message["level"]),
        what=words["what"],
        why=words.get("why", ""),
        hint=words["hint"],
        source=words.get("source", ""),
    )
