"""Make findings of the texts in recipes/doctor: what is said, why, and what to do, is data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.paths import RECIPES
from patchkit.records import read_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingText:
    """A finding as a file has it; ``{fields}`` of its texts are filled in.

    ``fine`` is what the check says where nothing is wrong.
    """

    id: str
    level: Level
    says: str
    why: str
    hint: str
    source: str
    fine: str = ""


@cache
def finding_texts(file: str) -> Mapping[str, FindingText]:
    """Return the texts of a file of recipes/doctor by id, in its order."""
    found = read_toml(tuple[FindingText, ...], RECIPES / "doctor" / file, key="finding")
    return {each.id: each for each in found}


def told(file: str, about: str, where: str, **fields: object) -> Finding:
    """Return a finding of a file of recipes/doctor; ``where`` is the node or the log."""
    text = finding_texts(file)[about]
    return Finding(
        kind=HostError,
        level=text.level,
        where=where,
        about=about,
        what=text.says.format_map(fields),
        why=text.why.format_map(fields),
        hint=text.hint.format_map(fields),
        source=text.source.format_map(fields),
    )


def fine(file: str, about: str, where: str, **fields: object) -> Finding:
    """Return that a check of a file found nothing wrong, with what was seen."""
    text = finding_texts(file)[about]
    return Finding(
        level=Level.OK,
        where=where,
        about=about,
        what=text.fine.format_map(fields),
        source=text.source.format_map(fields),
    )
