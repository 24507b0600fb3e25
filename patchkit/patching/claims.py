"""Advice of guides about an upstream project, each with a verdict; it is no fix of patchkit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from patchkit.patching.fix import Evidence
from patchkit.records import RECIPES, read_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One entry of ``folklore.toml``; the fields are described there."""

    id: str
    says: str
    verdict: str
    versions: str
    why: str
    instead: str
    evidence: tuple[Evidence, ...]


@cache
def load_claims(project: str = "vllm") -> tuple[Claim, ...]:
    """Return the claims that ship with a recipe, in the order of the file; none without one."""
    place = RECIPES / project / "folklore.toml"
    return read_toml(tuple[Claim, ...], place, key="claim") if place.is_file() else ()
