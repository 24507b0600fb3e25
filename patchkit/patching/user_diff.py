"""Check the unified diff of a user, and apply it with git in a folder that holds nothing else.

git reads and applies the diff; no setting of the user, the tree or the system has a say in it. What
git would pass over in silence is refused here: lines behind the end of a hunk, a hunk without lines
around it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from patchkit.durable.paths import is_file, is_plain
from patchkit.durable.staging import ScratchFolder
from patchkit.errors import UsageError
from patchkit.reading import read_text
from patchkit.source.git import call_git_alone

_UNREADABLE = {
    "\0": "has a NUL",
    "\r": "has CR line endings, and every release has LF",
    "\n@@@": "is the diff of a merge",
    "\ndiff --c": "is the diff of a merge",
}
_HUNK = re.compile(
    r"^@@ -(\d{1,9})(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@.*\n", re.MULTILINE
)
# Where the names are is a line that no hunk can hold: "@@" follows.
_NAMES = re.compile(r"^--- ([^\t\n]*).*\n\+\+\+ ([^\t\n]*).*\n(?=@@ -)", re.MULTILINE)
_MOVED = re.compile(r"^(?:rename|copy) from (.*)", re.MULTILINE)
# What git apply says of hunks.
_FAILED_LINE = re.compile(r"^error: patch failed: .*:(\d+)$", re.MULTILINE)
_REJECTED_HUNK = re.compile(r"^Rejected hunk #(\d+)", re.MULTILINE)
_MOVED_HUNK = re.compile(r"^Hunk #\d+ succeeded at ", re.MULTILINE)
# Changes of a file beyond its text.
_BEYOND = re.compile(
    r"^(?:deleted |rename |copy |old mode |new file mode (?!100644)|Binary |GIT binary ).*",
    re.MULTILINE,
)
_BLOB = re.compile(r"^index ([0-9a-f]{4,64})\.\.", re.MULTILINE)
_PREFIXED = re.compile(r'"?[a-z]/')
_NOTHING = "/dev/null"
_MOST_FILES = 1000  # the largest pull requests of vLLM have some hundreds
_MOST_HUNKS = 5000
_SHOWN = 200  # characters of a name
# Programs obey what lies there; it is not compiled.
_OBEYED = frozenset({".git", ".patchkit"})
_FAR = "999999999"  # a line behind the end of every file
# Of hunks but those of line 1, which begin the file: git takes them nowhere else.
_LINE_NUMBERS = re.compile(r"^@@ -(?:[2-9]|\d\d+)(,\d+)? \+\d+(,\d+)? @@", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FileDiff:
    """The part of a diff that is about one file.

    ``strip`` is the option of ``git apply`` for the prefix of names. ``blob`` is git's id of the
    text that the diff was made against, "" if it has none. ``beyond`` is the line that does more
    than change the text, "" without one.
    """

    path: str
    part: str
    strip: str
    creates: bool
    beyond: str
    blob: str


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of applying the diff of one file to a text.

    ``after`` is None unless every hunk fits. ``moved``: some hunk fits at another line than the
    diff names. ``rejected`` maps the number of each hunk that does not fit to its line.
    """

    after: str | None
    moved: bool
    rejected: dict[int, str]
    trouble: str


def parse_diff(text: str, name: str) -> list[FileDiff]:
    """Return what a diff does to each file. Raises UsageError for an unsound diff.

    Raises HostError without git.
    """
    for mark, problem in _UNREADABLE.items():
        if mark in f"\n{text}":
            raise _refused(f"{name} {problem}")

    is_git_diff = re.search("^diff --git ", text, re.MULTILINE)
    start = "^(?=diff --git )" if is_git_diff else r"^(?=--- .*\n\+\+\+ .*\n@@ -)"
    preamble, *parts = re.split(start, text, flags=re.MULTILINE)
    if not parts or _HUNK.search(preamble):
        raise _refused(
            f"{name} holds no unified diff, or one without the name of a file"
        )
    _check_counts(text, parts, name)

    strip = _strip_option(text)
    paths = _read_paths(text, strip, name)
    if len(paths) != len(parts):
        raise _refused(f"{name} has a part without a name, or without a change")

    files = []
    for path, part in zip(paths, parts, strict=True):
        files += _read_part(path, part, strip, name)
    _check_paths([file.path for file in files], name)
    return files


def try_diff(file: FileDiff, text: str | None, *options: str) -> Trial:
    """Apply the diff of one file to a text; None is no file. Raises HostError without git."""
    with ScratchFolder() as folder:
        place = Path(folder) / file.path
        place.parent.mkdir(parents=True)
        if text is not None:
            place.write_bytes(text.encode())

        done = call_git_alone(
            Path(folder),
            "apply",
            file.strip,
            "--reject",  # go on behind a hunk that does not fit
            "--verbose",  # and tell of each
            "--whitespace=nowarn",
            *options,
            input=file.part.encode(),
        )
        after = None
        if done.status == 0 and is_file(place):
            after = read_text(place)

    lines = _FAILED_LINE.findall(done.errors)
    numbers = map(int, _REJECTED_HUNK.findall(done.errors))
    return Trial(
        after=after,
        moved=_MOVED_HUNK.search(done.errors) is not None,
        rejected=dict(zip(numbers, lines, strict=False)),
        trouble=done.trouble,
    )


def fits_once(file: FileDiff, text: str, after: str | None, *options: str) -> bool:
    """Return whether a moved diff has one place in a text: git takes the nearest of several.

    The places that are nearest to the begin and to the end of the file have to give ``after``, too.
    """
    for line in ("2", _FAR):
        part = _LINE_NUMBERS.sub(rf"@@ -{line}\1 +{line}\2 @@", file.part)
        trial = try_diff(replace(file, part=part), text, *options)
        if trial.after != after:
            return False
    return True


def _refused(what: str, hint: str = "make it with git diff") -> UsageError:
    why = "it is not a patch of plain texts, as git writes it"
    return UsageError(what, why=why, hint=hint)


def _check_counts(text: str, parts: Sequence[str], name: str) -> None:
    """Raise UsageError for more files or hunks than any patch of a release has."""
    if len(parts) > _MOST_FILES:
        raise _refused(
            f"{name} changes {len(parts)} files, and {_MOST_FILES} are the most"
        )
    hunks = len(_HUNK.findall(text))
    if hunks > _MOST_HUNKS:
        raise _refused(f"{name} has {hunks} hunks, and {_MOST_HUNKS} are the most")


def _strip_option(text: str) -> str:
    """Return -p1 if every name has a prefix, such as a/ and b/, which is no folder; else -p0."""
    for names in _NAMES.findall(text):
        for name in names:
            if name.strip() != _NOTHING and not _PREFIXED.match(name):
                return "-p0"
    return "-p1"


def _read_paths(text: str, strip: str, name: str) -> list[str]:
    """Return the path of each part, as git reads it."""
    with ScratchFolder() as folder:
        done = call_git_alone(
            Path(folder), "apply", strip, "--numstat", "-z", input=text.encode()
        )
    if done.trouble:
        _, _, last_line = done.errors.strip().rpartition("\n")
        raise _refused(f"{name}: git apply: {last_line or done.trouble}")

    paths = []
    for row in done.output.removesuffix("\0").split("\0"):
        _added, _deleted, path = row.split("\t", 2)
        paths.append(path)
    return paths


def _read_part(path: str, part: str, strip: str, name: str) -> list[FileDiff]:
    """Return what a part does to its file, and to the file that it moves or copies."""
    where = f"{name}, {path[:_SHOWN]}"
    head, *fields = _HUNK.split(part)
    for index in range(0, len(fields), 4):
        hunk = f"{where}: hunk {index // 4 + 1}"
        _check_hunk(hunk, *fields[index : index + 4])

    # In a part of diff itself, a line of its own may follow the hunks.
    change = _BEYOND.search(head if part.startswith("diff ") else part)
    moved = _MOVED.search(head)
    blob = _BLOB.search(head)
    file = FileDiff(
        path=path,
        part=part,
        strip=strip,
        creates="\nnew file mode " in head or "--- /dev/null" in head,
        beyond=change[0] if change else "",
        blob=blob[1] if blob else "",
    )
    if moved:
        return [file, replace(file, path=moved[1].strip('"'))]
    return [_check_names(file, where)]


def _check_names(file: FileDiff, where: str) -> FileDiff:
    """Return a file, as deleted if the second name says so. Raises UsageError for two names."""
    names = _NAMES.findall(file.part)
    if len(names) > 1:
        raise _refused(f"{where}: has hunks of another file")

    for pair in names:
        old, new = map(_bare_name, pair)
        if new == _NOTHING:
            beyond = file.beyond or f"{old} → {new}"
            return replace(file, beyond=beyond)
        if old not in (_NOTHING, new):
            raise _refused(f"{where}: is named {old[:_SHOWN]!r} as well")
    return file


def _bare_name(name: str) -> str:
    """Return a name of a diff without the prefix that tells both sides apart."""
    return re.sub(r'^("?)[a-z]/', r"\1", name.strip())


def _check_hunk(where: str, start: str, old: str, new: str, body: str) -> None:
    """Raise UsageError for a hunk that git takes, though no program writes such a one.

    ``start``, ``old`` and ``new`` are the numbers of its head.
    """
    count = int(old or 1)
    total = int(new or 1)
    rows = (row for row in body.split("\n") if not row.startswith("\\"))
    before: list[str] = []
    after: list[str] = []
    signs = ""
    while len(before) < count or len(after) < total:
        row = next(rows) or " "  # mailers strip the blank of an empty line
        signs += row[0]
        if row[0] != "+":
            before.append(row[1:])
        if row[0] != "-":
            after.append(row[1:])

    # The end of a mail, "-- ", may follow, but no line of a hunk: git would ignore it.
    if re.match(r"[ +@]|-(?!-)|Binary ", next(rows, "")):
        raise _refused(f"{where} has other lines than its head says")
    changes_end = "\n\\ " in body
    has_change = before != after or changes_end
    has_lines_around = int(start) <= 1 or " " in signs
    if not (has_change and has_lines_around):
        raise _refused(f"{where} has no change, or no lines around it (-U0)")


def _check_paths(paths: Sequence[str], name: str) -> None:
    """Raise UsageError for a path that is no source, is there twice, or is another's folder."""
    files = set(paths)
    for path in paths:
        shown = path[:_SHOWN]
        is_obeyed = not _OBEYED.isdisjoint(path.casefold().split("/"))
        is_sound = is_plain(path) and path.isprintable()
        if is_obeyed or not is_sound:
            raise _refused(f"{name} names {shown!r}, which is no source in a tree")

        folders = map(str, PurePosixPath(path).parents)
        if not files.isdisjoint(folders):
            raise _refused(f"{name} has a file where {shown} has a folder")

    if len(files) < len(paths):
        hint = "name the .diff of the pull request, or each patch of a series by itself"
        raise _refused(f"{name} changes a file twice", hint)
