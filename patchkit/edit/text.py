"""Anchored edits for files without a parser of their own (C++, CUDA): exact text, exact count."""

from __future__ import annotations

from patchkit.edit.splice import Edit, line_of
from patchkit.errors import DriftError


def swap_text(
    path: str,
    text: str,
    before: str,
    after: str,
    *,
    note: str,
    within: tuple[int, int] | None = None,
) -> list[Edit]:
    """The edit that turns ``before`` into ``after``; ``[]`` if it is done already.

    ``within`` limits the search to a span. Raises DriftError unless exactly one of the two is
    found, exactly once.
    """
    start, stop = within or (0, len(text))
    spots = [start + spot for spot in occurrences(text[start:stop], before)]
    done = len(occurrences(text[start:stop], after))
    if done == 1 and len(spots) == after.count(before):
        return []
    if len(spots) == 1 and not done:
        return [Edit(path, spots[0], spots[0] + len(before), after, note)]
    raise drift(path, text, before, spots)


def region(path: str, text: str, opening: str, closing: str) -> tuple[int, int]:
    """The span from the only ``opening`` to the next ``closing``. Raises DriftError."""
    starts = occurrences(text, opening)
    stop = text.find(closing, starts[0]) if starts else -1
    if len(starts) != 1 or stop < 0:
        raise drift(path, text, opening, starts)
    return starts[0], stop + len(closing)


def occurrences(text: str, needle: str) -> list[int]:
    """Start offsets of every non-overlapping occurrence."""
    starts = []
    start = text.find(needle)
    while start >= 0:
        starts.append(start)
        start = text.find(needle, start + len(needle))
    return starts


def drift(path: str, text: str, needle: str, spots: list[int]) -> DriftError:
    """The error for an anchor that is missing, or found more than once."""
    first = needle.strip().splitlines()[0]
    lines = ",".join(str(line_of(text, spot)) for spot in spots)
    return DriftError(
        f"{path}:{lines or 1}: {first!r} found {len(spots)} times, expected 1",
        why="the code was edited by hand, is half patched, or upstream rewrote it",
        hint="restore the file from the release, or leave this fix out with --skip",
    )
