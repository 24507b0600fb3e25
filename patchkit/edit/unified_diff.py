"""Read unified diffs as git and diff write them, and find where their hunks are in a text.

Not with unidiff: it takes names and counts as they come, and a patch is a stranger's text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from patchkit.durable.paths import is_plain
from patchkit.errors import UsageError

_UNREADABLE = re.compile(r"\0|\r|^@@@|^diff --c", re.MULTILINE)
_SAID = {"\0": "has a NUL", "\r": "has CR line endings, and every release has LF"}
_HUNK = re.compile(
    r"^@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@.*\n", re.MULTILINE
)
_NAMES = re.compile(
    r"^--- ([^\t\n]*).*\n\+\+\+ ([^\t\n]*).*\n", re.MULTILINE
)  # a tab, and a date
_MOVED = re.compile(
    r"^(?:rename|copy) from (.*)\n(?:rename|copy) to (.*)", re.MULTILINE
)
# What is done to a file beyond its text.
_BEYOND = re.compile(
    r"^(?:deleted |rename |copy |old mode |new file mode (?!100644)|Binary |GIT binary ).*",
    re.MULTILINE,
)
_MOST_FILES = 1000  # the largest pull requests of vLLM have some hundreds
_MOST_HUNKS = 5000
_MOST_SPOTS = 100
_SHOWN = 200  # characters of a name
_APART = frozenset({".git", ".patchkit"})  # what lies there is obeyed, not compiled


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines before and after, the line at which each of these ``texts`` starts by the hunk's head.

    ``opens``: the file begins with it; ``closes``: the file ends with it.
    """

    name: str
    starts: tuple[int, int]
    texts: tuple[str, str]
    opens: bool
    closes: bool

    def find_spots(self, text: str, side: int) -> list[int]:
        """Return the offsets at which the lines before (0) or after (1) begin in a text.

        Of many places the first ones are enough to say that it is not one.
        """
        spots: list[int] = []
        at = text.find(self.texts[side])
        while at >= 0 and len(spots) < _MOST_SPOTS:
            if self.is_at(text, at, side):
                spots.append(at)
            at = text.find(self.texts[side], at + 1)
        return spots

    def is_at(self, text: str, at: int, side: int) -> bool:
        """Return whether the lines begin at an offset of a text, which is that of a line."""
        lines = self.texts[side]
        if not text.startswith(lines, at):
            return False
        begins = at == 0 or (text[at - 1] == "\n" and not self.opens)
        return begins and (not self.closes or at + len(lines) == len(text))


@dataclass(frozen=True, slots=True)
class FileDiff:
    """What a diff does to a file; ``blob`` is git's id of the text that it was made against.

    ``beyond`` is the line that says what it does beyond the text, "" without one.
    """

    path: str
    creates: bool
    beyond: str
    blob: str
    hunks: tuple[Hunk, ...]


def parse_diff(text: str, name: str) -> list[FileDiff]:
    """Return what a diff does to each file. Raises UsageError for one that is not sound."""
    if found := _UNREADABLE.search(text):
        raise refused(f"{name} {_SAID.get(found[0], 'is the diff of a merge')}")
    text = re.sub(
        r"\n\\ .*", "\0", text
    )  # "\ No newline at end of file", of the line above
    by_git = re.search("^diff --git ", text, re.MULTILINE)
    start = "^(?=diff --git )" if by_git else r"^(?=--- .*\n\+\+\+ )"
    head, *parts = re.split(start, text, flags=re.MULTILINE)
    _check_counts(text, parts, name)
    files = [file for part in parts for file in _read_part(part, name)]
    if not files or re.search("^@@ ", head, re.MULTILINE):
        raise refused(
            f"{name} holds no unified diff, or one without the name of a file"
        )
    _check_paths([file.path for file in files], name)
    return files


def _check_counts(text: str, parts: Sequence[str], name: str) -> None:
    """Raise UsageError for more files or hunks than any patch of a release has."""
    if len(parts) > _MOST_FILES:
        raise refused(
            f"{name} changes {len(parts)} files, and {_MOST_FILES} are the most"
        )
    hunks = sum(1 for _hunk in _HUNK.finditer(text))
    if hunks > _MOST_HUNKS:
        raise refused(f"{name} has {hunks} hunks, and {_MOST_HUNKS} are the most")


def _check_paths(paths: Sequence[str], name: str) -> None:
    """Raise UsageError for a file that is there twice, or is a folder of another one."""
    files = set(paths)
    if len(files) < len(paths):
        hint = "name the .diff of the pull request, or each patch of a series by itself"
        raise refused(f"{name} changes a file twice", hint)
    for path in paths:
        if not files.isdisjoint(map(str, PurePosixPath(path).parents)):
            raise refused(f"{name} has a file where {path[:_SHOWN]} has a folder")


def refused(what: str, hint: str = "make it with git diff") -> UsageError:
    """Return the error for a patch that cannot be taken."""
    return UsageError(
        what, why="it is not a patch of plain texts, as git writes it", hint=hint
    )


def _read_part(part: str, name: str) -> Iterator[FileDiff]:
    """Yield what is done to a file; if it is moved, to two."""
    head, *rest = _HUNK.split(part)
    line = part.partition("\n")[0].removeprefix("diff --git ")
    # Without lines of their own, of an empty or a binary file, both names are the same.
    same = line[: len(line) // 2], line[len(line) // 2 + 1 :]
    named = _NAMES.search(head) or _MOVED.search(head)
    old, new = (
        _bare_name(it.strip(), name) for it in (named.groups() if named else same)
    )
    creates = old == "/dev/null" or "\nnew file mode " in head
    beyond = _BEYOND.search(head if part.startswith("diff ") else part)
    says = beyond[0] if beyond else "" if creates or old == new else f"{old} → {new}"
    hunks = tuple(
        _read_hunk(
            f"hunk {at // 5 + 1}", rest[at : at + 4], rest[at + 4], f"{name}, {new}"
        )
        for at in range(0, len(rest), 5)
    )
    odd = creates and any(hunk.texts[0] for hunk in hunks)
    if (
        odd
        or not (hunks or creates or says)
        or len(_NAMES.findall(part)) > 1
        or "\n@@" in head
    ):
        raise refused(f"{name}, {new}: has no hunks, or those of another file")
    blob = re.search(r"^index ([0-9a-f]{4,64})\.\.", head, re.MULTILINE)
    for path in {old, new} - {"/dev/null"}:
        if (
            not is_plain(path)
            or not path.isprintable()
            or _APART & {*path.casefold().split("/")}
        ):
            raise refused(
                f"{name} names {path[:_SHOWN]!r}, which is no source in a tree"
            )
        yield FileDiff(path, creates, says, blob[1] if blob else "", hunks)


def _bare_name(name: str, where: str) -> str:
    r"""Return a name without a/ or b/, which git quotes ("\303\244") where it is not plain."""
    if len(name) > 1 and name[0] == name[-1] == '"':
        try:
            name = (
                name[1:-1].encode().decode("unicode_escape").encode("latin-1").decode()
            )
        except UnicodeError:
            raise refused(f"{where} names {name}, which is no UTF-8") from None
    return re.sub(r"^[a-z]/", "", name)


def _read_hunk(name: str, numbers: list[str | None], body: str, where: str) -> Hunk:
    start, count, goal, total = (int(it or 1) for it in numbers)
    left, rows, more = [count, total], list[str](), ""
    for more in [*body.split("\n"), ""]:
        if max(left) <= 0:
            break
        row = more or " "  # mailers strip the blank of an empty line
        rows.append(f"{row}\n".replace("\0\n", ""))
        left = [left[0] - (row[0] != "+"), left[1] - (row[0] != "-")]
    signs = "".join(row[0] for row in rows)
    # What follows may be the end of a mail, "-- ", but no line of a hunk.
    if (
        left != [0, 0]
        or set(signs) - set(" +-")
        or re.match(r"[+ @]|-(?!-)|Binary ", more)
    ):
        raise refused(f"{where}: {name} has other lines than its head says")
    before, after = (
        "".join(row[1:] for row in rows if row[0] != other) for other in "+-"
    )
    opens, closes = start <= 1, signs[-1:] != " " or after[-1:] != "\n"
    if before == after or (" " not in signs and not opens):
        raise refused(f"{where}: {name} has no change, or no lines around it (-U0)")
    return Hunk(name, (start, goal), (before, after), opens, closes)
