"""Load how much each release needs each fix, as plans of untouched releases said."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from functools import cache

from patchkit.patching.fix import State, Verdict
from patchkit.records import RECIPES, read_json

Support = Mapping[str, Mapping[str, Mapping[str, "SupportLevel"]]]
"""fix id → arch mode → release → level"""


class SupportLevel(enum.StrEnum):
    """Level at which a release needs a fix, or the reason that it does not."""

    REQUIRED = "required"
    RECOMMENDED = "recommended"
    OPTIONAL = "optional"
    UPSTREAM = "upstream"
    NOT_APPLICABLE = "not-applicable"


def support_of(verdict: Verdict) -> SupportLevel:
    """Return the level that a verdict on an untouched release amounts to."""
    if verdict.state in (State.UPSTREAM, State.NOT_APPLICABLE):
        return SupportLevel(verdict.state.value)
    assert verdict.severity is not None
    return SupportLevel(verdict.severity.value)


@cache
def load_support(project: str = "vllm") -> Support:
    """Return the table ``support.json`` of a recipe; empty if its releases cannot be had."""
    place = RECIPES / project / "support.json"
    text = place.read_text(encoding="utf-8") if place.is_file() else "{}"
    return read_json(dict[str, dict[str, dict[str, SupportLevel]]], text)
