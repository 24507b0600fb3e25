"""Read what is known of the QSFP network: recipes/env/network.toml."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from patchkit.paths import RECIPES
from patchkit.records import read_toml


@cache
def facts() -> Mapping[str, Mapping[str, Any]]:
    """Return ``recipes/env/network.toml``: tables ``plan``, ``link`` and ``owners``."""
    return read_toml(dict[str, dict[str, Any]], RECIPES / "env" / "network.toml")
