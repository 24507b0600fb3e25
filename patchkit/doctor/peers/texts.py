"""Make findings of the checks between nodes; their texts are data, recipes/doctor/peers.toml."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from patchkit.finding import (
    Finding,
    FindingText,
    Level,
    finding_from_text,
    finding_texts,
    fine_from_text,
)

_FILE = "peers.toml"

wrong = partial(finding_from_text, _FILE)
fine = partial(fine_from_text, _FILE)


def peer_checks() -> Mapping[str, FindingText]:
    """Return the checks by id, in the order of causes."""
    return finding_texts(_FILE)


def unknown(about: str, where: str, reason: str, hint: str = "") -> Finding:
    """Return that it was not looked at, with the reason."""
    what = f"not checked: {reason}"
    return Finding(level=Level.UNKNOWN, where=where, about=about, what=what, hint=hint)
