"""Make findings of the checks between nodes; their texts are data, recipes/doctor/peers.toml."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from patchkit.finding import (
    FindingText,
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
