"""Check for lines that sh, systemd and docker read differently."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from patchkit.finding import Finding, Level
from patchkit.runtime.files.content import FileKind
from patchkit.runtime.formats.env_lines import without_comment
from patchkit.runtime.formats.kind import is_env_file

_ASSIGNED = re.compile(r"\s*(?P<export>export\s+)?(?P<name>\w+)=(?P<value>.*)")


def check_reading(text: str, kind: FileKind, written_as: str) -> Iterator[Finding]:
    """Return what sh, systemd and docker read differently; ``written_as`` is our format, if it is.

    Each kind of difference is reported once: its first line, and how many there are.
    """
    if written_as:  # a file of patchkit's own says for which program it was written
        return
    if "\r\n" in text:
        yield _differently(_CRLF, [(1, "the file")])
    if kind is not FileKind.ENV or not is_env_file(text):
        return
    places: dict[_Difference, list[tuple[int, str]]] = {}
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        match = _ASSIGNED.fullmatch(line)
        for difference in _differences(line, match) if match else ():
            places.setdefault(difference, []).append((number, match["name"] if match else ""))
    exported = len(places.get(_EXPORT, ()))
    if exported and exported == sum(map(bool, map(_ASSIGNED.fullmatch, text.splitlines()))):
        places = {_EXPORT: places[_EXPORT]}  # for a shell alone, which reads all the rest
    for difference, where_ in places.items():
        yield _differently(difference, where_)


@dataclass(frozen=True, slots=True)
class _Difference:
    what: str
    why: str
    level: Level = Level.WARNING


_CRLF = _Difference("lines end with CR LF", "For sh and docker compose, CR is part of the values.")
_EXPORT = _Difference(
    "export", "systemd and docker take no export, and sh needs none: set -a.", Level.NOTE
)
_COMMENT = _Difference(
    "a comment behind the value", "To systemd and docker it is part of the value."
)
_QUOTES = _Difference(
    "quotes", "docker run --env-file keeps them as part of the value.", Level.NOTE
)
_BLANKS = _Difference("blanks in the value", "sh runs what follows the blank as a command.")
_DOLLAR = _Difference(
    "$ in the value", "sh and docker compose expand it, systemd and docker run do not."
)


def _differences(line: str, match: re.Match[str]) -> Iterator[_Difference]:
    plain = without_comment(line)
    value = plain.partition("=")[2].strip()
    if match["export"]:
        yield _EXPORT
    if plain and plain != line.rstrip():
        yield _COMMENT
    if value[:1] in {"'", '"'}:
        yield _QUOTES
    elif re.search(r"\s", value):
        yield _BLANKS
    if "$" in value and not value.startswith("'"):
        yield _DOLLAR


def _differently(difference: _Difference, places: Sequence[tuple[int, str]]) -> Finding:
    number, name = places[0]
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return Finding(
        line=number,
        about=name if name.isidentifier() else "",
        level=difference.level,
        what=f"{name}{more}: {difference.what}, which not every tool reads alike",
        why=difference.why,
        hint="write NAME=value alone, as `patchkit env` does",
        source="docs/env-files.md",
    )
