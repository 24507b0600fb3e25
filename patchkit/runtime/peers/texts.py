"""Make findings of the checks between nodes; their texts are data, recipes/doctor/peers.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from patchkit.errors import HostError
from patchkit.finding import Finding, Level
from patchkit.paths import RECIPES
from patchkit.records import read_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCheck:
    """A check: ``says`` and ``fine`` are its texts where something and where nothing is wrong."""

    id: str
    severity: Literal["error", "warning", "note"]
    fine: str
    says: str
    why: str
    hint: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _PeerChecks:
    checks: tuple[PeerCheck, ...] = field(metadata={"key": "check"})


@cache
def peer_checks() -> Mapping[str, PeerCheck]:
    """Return the checks by id, in the order of causes."""
    read = read_toml(_PeerChecks, RECIPES / "doctor" / "peers.toml")
    return {each.id: each for each in read.checks}


def wrong(about: str, where: str, **fields: object) -> Finding:
    """Return what is wrong, of the check's own level."""
    check = peer_checks()[about]
    return Finding(
        kind=HostError,
        level=Level(check.severity),
        where=where,
        about=about,
        what=check.says.format_map(fields),
        why=check.why.format_map(fields),
        hint=check.hint.format_map(fields),
        source=check.source,
    )


def fine(about: str, where: str, **fields: object) -> Finding:
    """Return that nothing is wrong, with what was seen."""
    what = peer_checks()[about].fine.format_map(fields)
    return Finding(level=Level.OK, where=where, about=about, what=what)


def unknown(about: str, where: str, reason: str, hint: str = "") -> Finding:
    """Return that it was not looked at, with the reason."""
    what = f"not checked: {reason}"
    return Finding(level=Level.UNKNOWN, where=where, about=about, what=what, hint=hint)
