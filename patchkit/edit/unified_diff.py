"""Read unified diffs as git and diff write them, and find where their hunks are in a text.

Not with unidiff: it takes names and counts as they come, and a patch is a stranger's text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from patchkit.durable.names import plain
from patchkit.edit.splice import line_of
from patchkit.errors import UsageError

_HUNK = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_UNREADABLE = re.compile(r"\0|\r|^(?:@@@|diff --c)", re.MULTILINE)
# What a line of git's header does beyond the text of a file.
_BEYOND = (
    ("deleted file mode ", "removes it"),
    ("rename ", "renames it"),
    ("copy ", "copies it"),
    ("old mode ", "changes its mode"),
    ("new file mode 100755", "makes a program"),
    ("new file mode 120000", "makes a symbolic link"),
    ("new file mode 160000", "makes a submodule"),
    ("Binary files ", "is binary"),
    ("GIT binary patch", "is binary"),
)
_APART = frozenset({".git", ".patchkit"})  # what lies there is obeyed, not compiled


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines before and after, the line at which each of these ``texts`` starts by the hunk's head.

    ``opens``: the file begins with it; ``closes``: the file ends with it.
    """

    where: str
    starts: tuple[int, int]
    texts: tuple[str, str]
    opens: bool
    closes: bool

    def find_spots(self, text: str, side: int) -> list[int]:
        """Return every offset at which the lines before (0) or after (1) begin in a text."""
        start, end = r"\A" if self.opens else "^", r"\Z" if self.closes else ""
        pattern = f"{start}(?={re.escape(self.texts[side])}{end})"
        return [match.start() for match in re.finditer(pattern, text, re.MULTILINE)]


@dataclass(slots=True)
class FileDiff:
    """What a diff does to a file; ``blob`` is git's id of the text that it was made against.

    ``beyond`` is what it does that is no change of a text, "" for nothing.
    """

    where: str
    path: str = ""
    creates: bool = False
    beyond: str = ""
    blob: str = ""
    hunks: list[Hunk] = field(default_factory=list)


def parse_diff(text: str, name: str) -> list[FileDiff]:
    """Return what a diff does to each file. Raises UsageError, with the line in file ``name``."""
    if found := _UNREADABLE.search(text):
        said = {"\0": "has a NUL", "\r": "has CR line endings, and every release has LF"}
        where = f"{name}:{line_of(text, found.start())}"
        raise refused(where, said.get(found[0], "is the diff of a merge"))
    lines, files, number = text.split("\n"), list[FileDiff](), 0
    while number < len(lines):
        line, where = lines[number], f"{name}:{number + 1}"
        if line.startswith("diff --git "):
            files.append(FileDiff(where, _header_path(line, where)))
        elif line.startswith("--- ") and "".join(lines[number + 1 : number + 2])[:4] == "+++ ":
            if not files or files[-1].hunks:
                files.append(FileDiff(where))
            number += 1
            _read_names(files[-1], line, lines[number])
        elif line.startswith("@@"):
            hunk, number = _read_hunk(lines, number, where)
            if not files or not files[-1].path:
                raise refused(where, "is a hunk without the name of a file")
            files[-1].hunks.append(hunk)
        elif files and not files[-1].hunks:
            _read_header(files[-1], line)
        number += 1
    _check_paths(files, name)
    return files


def refused(where: str, what: str, hint: str = "make it with git diff") -> UsageError:
    """Return the error for a patch that cannot be taken."""
    return UsageError(f"{where}: {what}", why="it is no patch of plain texts", hint=hint)


def _check_paths(files: Sequence[FileDiff], name: str) -> None:
    if not files:
        raise refused(name, "holds no unified diff")
    known: dict[str, str] = {}
    for file in files:
        if not plain(file.path) or not file.path.isprintable() or file.path.startswith("~"):
            raise refused(file.where, f"names {file.path!r}, which is no plain path in a tree")
        if _APART.intersection(file.path.casefold().split("/")):
            raise refused(file.where, f"names {file.path}, which is no source")
        if file.path in known:
            what = f"changes {file.path} a second time, after {known[file.path]}"
            raise refused(file.where, what, "give each patch of a series its own --patch")
        known[file.path] = file.where


def _header_path(line: str, where: str) -> str:
    """Return the path of ``diff --git a/X b/X``; "" for two, which other lines name."""
    names = line.removeprefix("diff --git ")
    half = len(names) // 2
    old, new = (_bare_name(each, where) for each in (names[:half], names[half + 1 :]))
    return new if old == new else ""


def _read_header(file: FileDiff, line: str) -> None:
    if match := re.match(r"index ([0-9a-f]{4,64})\.\.", line):
        file.blob = match[1]
    elif line.startswith(("rename to ", "copy to ")):
        file.path = line.partition(" to ")[2]
    file.creates |= line.startswith("new file mode ")
    does = (does for said, does in _BEYOND if line.startswith(said))
    file.beyond = next(does, file.beyond)


def _read_names(file: FileDiff, before: str, after: str) -> None:
    """Read the lines ``---`` and ``+++``, which may hold a date behind a tab."""
    old, new = (_bare_name(line[4:].split("\t")[0], file.where) for line in (before, after))
    file.creates = old == "/dev/null"
    file.path = old if new == "/dev/null" else new
    if old != new and not file.creates:
        file.beyond = "removes it" if new == "/dev/null" else "renames it"


def _bare_name(name: str, where: str) -> str:
    r"""Return a name without a/ or b/, which git quotes ("\303\244") where it is not plain."""
    if len(name) > 1 and name[0] == name[-1] == '"':
        try:
            name = name[1:-1].encode().decode("unicode_escape").encode("latin-1").decode()
        except UnicodeError:
            raise refused(where, f"names {name}, which is no UTF-8") from None
    return re.sub(r"^[a-z]/", "", name)


def _read_hunk(lines: Sequence[str], number: int, where: str) -> tuple[Hunk, int]:
    """Return the hunk whose head is at ``number``, and where its last line is."""
    head, rows = _HUNK.match(lines[number]), list[str]()
    left = [int(head[2] or 1), int(head[4] or 1)] if head else [1, 1]
    while number + 1 < len(lines) and (max(left) > 0 or lines[number + 1].startswith("\\")):
        number += 1
        row = lines[number] or " "  # mailers strip the blank of an empty line
        if row[0] == "\\" and rows:  # "\ No newline at end of file"
            rows[-1] = rows[-1].removesuffix("\n")
            continue
        rows.append(f"{row}\n")
        left = [left[0] - (row[0] != "+"), left[1] - (row[0] != "-")]
    signs = "".join(row[0] for row in rows)
    # What follows may be the end of a mail, "-- ", but no line of a hunk.
    more = re.match(r"[+ ]|-(?!-)|Binary ", "".join(lines[number + 1 : number + 2]))
    if not head or left != [0, 0] or set(signs) - set(" +-") or more:
        raise refused(where, "is a hunk with other lines than its head says")
    before, after = ("".join(row[1:] for row in rows if row[0] != other) for other in "+-")
    starts, closes = (int(head[1]), int(head[3])), signs[-1:] != " " or not after.endswith("\n")
    opens = signs[:1] != " " and starts[0] <= 1
    if before == after or (" " not in signs and not opens):
        raise refused(where, "is a hunk without a change, or without lines around it (-U0)")
    return Hunk(where, starts, (before, after), opens, closes), number
