"""Show the plan of a node's memory: a picture of its GiB, and a line for each part."""

from __future__ import annotations

from collections.abc import Iterator

from patchkit.cli.render import counted_noun
from patchkit.runtime.memory.plan import MemoryPlan, MemoryRow

_WIDTH = 60  # columns of the picture
_CACHE = "KV cache"


def memory_lines(plan: MemoryPlan | None) -> Iterator[str]:
    """Yield the lines of a plan; none for no plan, or one that lacks parts."""
    if plan is None or not plan.is_whole:
        return

    total = plan.total_gib
    cache = MemoryRow(_CACHE, max(plan.cache_gib, 0), _cache_text(plan))
    rows = [*plan.rows, cache, *plan.outside]
    rest = total - sum(row.gib for row in rows)
    rows.append(MemoryRow("unused", rest, "--gpu-memory-utilization leaves it"))

    yield f"memory of a node: {total:.1f} GiB"
    yield f"  {_draw(rows, total)}"
    for row in rows:
        if row.gib > 0:
            yield f"  {row.name:<12}{row.gib:6.1f}  {row.source}"


def _cache_text(plan: MemoryPlan) -> str:
    """Return the longest context that the cache holds, and how many such requests at once."""
    longest = plan.longest_context
    if not longest:
        return "how long a request may be is unknown"
    requests = counted_noun(plan.fitting_sequences(longest), "request")
    return f"{requests} of {longest:,} tokens"


def _draw(rows: list[MemoryRow], total: float) -> str:
    """Return a bar in which each part has its first letter, as wide as its share."""
    bar = ""
    end = 0.0
    for row in rows:
        end += max(row.gib, 0)
        columns = round(end / total * _WIDTH)
        bar += row.name[0].upper() * (columns - len(bar))
    return f"[{bar[:_WIDTH]:<{_WIDTH}}]"
