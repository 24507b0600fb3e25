"""Anchored edits for files without a parser of their own (C++, CUDA): exact text, exact count."""

import re
from collections.abc import Sequence

from patchkit.edit.splice import Edit, Edits, line_of
from patchkit.errors import AbsentError, DriftError, MissingError

HINT = "restore the file from the release, or leave this fix out with --without"


def swap_text(
    path: str,
    text: str,
    before: str,
    after: str,
    *,
    note: str,
    within: tuple[int, int] | None = None,
) -> Edits:
    """Return the edit that turns ``before`` into ``after``; ``[]`` if the text has ``after``.

    ``within`` limits the search to a span of offsets. Raises DriftError unless exactly one of
    ``before`` and ``after`` is found, and once.
    """
    start, stop = within or (0, len(text))
    section = text[start:stop]
    spots = [start + spot for spot in occurrences(section, before)]
    done = [start + spot for spot in occurrences(section, after)]

    # ``after`` may contain ``before``, as when text is inserted beside it.
    if len(done) == 1 and len(spots) == after.count(before):
        return []

    if len(spots) == 1 and not done:
        return [Edit(path, spots[0], spots[0] + len(before), after, note)]
    raise drift(path, text, before, spots, done)


def new_file(path: str, present: str | None, text: str, *, note: str) -> Edits:
    """Return the edit that creates a file; ``[]`` if the file has this ``text`` already.

    ``present`` is the text of the file, None if there is no file. Raises DriftError if the file
    has another text, which is the user's.
    """
    if present == text:
        return []
    if present is not None:
        raise DriftError(
            f"{path}: is there already, with another text",
            why="the user put a file there, or edited the one that belongs there",
            hint="move the file away, or leave this fix out with --without",
        )
    return [Edit(path, 0, 0, text, note, creates=True)]


def region(path: str, text: str, opening: str, closing: str) -> tuple[int, int]:
    """Return the span from the only ``opening`` to the end of the next ``closing``.

    Raises AbsentError without an ``opening``, DriftError if there are several, or no ``closing``.
    """
    starts = occurrences(text, opening)
    if not starts:
        raise absent(f"{path}: {opening.strip()!r} found 0 times, expected 1")
    if len(starts) > 1:
        raise drift(path, text, opening, starts)

    stop = text.find(closing, starts[0])
    if stop < 0:
        line = line_of(text, starts[0])
        raise DriftError(
            f"{path}:{line}: {opening!r} has no {closing.strip()!r}",
            why="the file was edited by hand, or cut short",
            hint=HINT,
        )
    return starts[0], stop + len(closing)


def occurrences(text: str, needle: str) -> list[int]:
    """Return the start offsets of all non-overlapping occurrences; ``needle`` is not empty."""
    assert needle
    return [match.start() for match in re.finditer(re.escape(needle), text)]


def absent(what: str) -> AbsentError:
    """Return the error for code that is missing in every form; ``what`` names code and file."""
    why = "upstream moved it, or the file was edited by hand"
    return AbsentError(what, why=why, hint=HINT)


def altered(what: str, kind: type[DriftError] = DriftError) -> DriftError:
    """Return the error for code that has another form; ``what`` says where, and which form."""
    why = "the code was edited by hand, is half patched, or upstream rewrote it"
    return kind(what, why=why, hint=HINT)


def drift(
    path: str,
    text: str,
    needle: str,
    spots: Sequence[int],
    done: Sequence[int] = (),
    scope: str = "",
    start: int = 0,
) -> DriftError:
    """Return the error for a text ``needle`` that was not found exactly once.

    It is a MissingError if neither the text nor its replacement was found.
    ``spots`` are the offsets where it was found, ``done`` those where its replacement was found.
    ``scope`` names the function that was searched, and ``start`` is the offset of that function.
    """
    anchor = needle.strip().splitlines()[0]
    shown = spots or done or [start]
    lines = ",".join(str(line_of(text, spot)) for spot in shown)
    count = f"found {len(spots)} times"
    if scope:
        count += f" in {scope}"
    expected = "expected 1"
    if done:
        expected = f"and what replaces it {len(done)} times"
    kind = DriftError if spots or done else MissingError
    return altered(f"{path}:{lines}: {anchor!r} {count}, {expected}", kind)
