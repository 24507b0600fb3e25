"""Edits as data: a span of one file and the text that takes its place."""

import difflib
import re
from collections.abc import Callable, Iterable

from patchkit.errors import AbsentError, DriftError, MissingError
from patchkit.frozen import positional


@positional
class Edit:
    """A replacement of ``text[start:stop]`` in the file ``path`` (POSIX, relative to the tree).

    Offsets count code points; ``start == stop`` inserts. With ``creates`` the replacement is the
    whole text of a file that must not exist yet.
    """

    path: str
    start: int
    stop: int
    replacement: str
    note: str
    creates: bool = False


Edits = list[Edit]


def splice(text: str, edits: Iterable[Edit]) -> str:
    """Apply edits of one file to its text. Raises DriftError if two of them overlap."""
    # Sorted by stop as well, so that an insertion precedes a replacement at the same place.
    ordered = sorted(edits, key=lambda edit: (edit.start, edit.stop))
    parts: list[str] = []
    position = 0

    for edit in ordered:
        if edit.start < position or edit.stop > len(text):
            line = line_of(text, edit.start)
            raise DriftError(
                f"{edit.path}:{line}: two edits touch the same text ({edit.note})",
                why="two fixes want to change the same place",
                hint="leave one of them out with --without",
            )
        parts += (text[position : edit.start], edit.replacement)
        position = edit.stop

    parts.append(text[position:])
    return "".join(parts)


def together(*places: Callable[[], Edits]) -> Edits:
    """Return the edits of several ``places``, of which a release has all or none.

    A place is a function that raises AbsentError if its code is missing. Raises AbsentError if all
    of them do. If only some do, raises MissingError, or DriftError if the others are edited.
    """
    edits: Edits = []
    missing: list[AbsentError] = []
    for place in places:
        try:
            edits += place()
        except AbsentError as error:
            missing.append(error)

    if len(missing) == len(places):
        raise missing[0]
    if missing:
        kind = MissingError if edits else DriftError
        raise kind(
            f"{missing[0].what}; other code of this fix is there",
            why="the file was edited by hand, or upstream moved it",
            hint=missing[0].hint,
        )
    return edits


def line_of(text: str, offset: int) -> int:
    """Return the 1-based line that holds ``offset``."""
    return text.count("\n", 0, offset) + 1


def unified_diff(path: str, before: str | None, after: str) -> str:
    """Return a diff that ``git apply`` takes, missing final newlines included; "" if equal.

    ``before`` is None for a file that is created.
    """
    # git's form for a file that is created.
    source = "/dev/null" if before is None else f"a/{path}"
    diff = difflib.unified_diff(
        _lines(before or ""),
        _lines(after),
        fromfile=source,
        tofile=f"b/{path}",
    )

    text = ""
    for line in diff:
        text += line
        if not line.endswith("\n"):
            text += "\n\\ No newline at end of file\n"
    return text


def git_diff(path: str, before: str | None, after: str) -> str:
    """Return ``unified_diff`` below git's own header, which names the mode of a new file."""
    head = f"diff --git a/{path} b/{path}\n"
    if before is None:
        head += "new file mode 100644\n"
    return head + unified_diff(path, before, after)


def _lines(text: str) -> list[str]:
    # str.splitlines would also split at form feeds and the like, which git does not.
    return re.findall(r".*\n|.+", text)
