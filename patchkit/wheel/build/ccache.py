"""Count what a compiler cache saved a build."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from patchkit.process import attempt

# Counters of `ccache --print-stats`; either hit spares a compilation.
_HITS = ("direct_cache_hit", "preprocessed_cache_hit")
_MISS = "cache_miss"


def counted(environment: Mapping[str, str]) -> dict[str, int] | None:
    """Read ccache's own counters as a build with these variables finds them; None without it."""
    ccache = shutil.which("ccache", path=environment.get("PATH"))
    if ccache is None or "CCACHE_DISABLE" in environment:
        return None
    done = attempt(ccache, "--print-stats", env=environment)
    rows = (line.split() for line in done.output.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def savings(before: Mapping[str, int] | None, after: Mapping[str, int] | None) -> str:
    """Say in a sentence how many compilations between two counts were hits."""
    if before is None or after is None:
        return "no ccache: a second build compiles everything again"
    grown = {name: after.get(name, 0) - before.get(name, 0) for name in (*_HITS, _MISS)}
    hits = sum(grown[name] for name in _HITS)
    if not hits + grown[_MISS]:
        return "ccache: nothing was compiled anew"
    return f"ccache: {hits} of {hits + grown[_MISS]} compilations were hits"
