"""Read env files by the rules of the programs that take them.

Stricter than these: a line that a consumer would skip in silence, or run as a command, is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NoReturn

from patchkit.errors import SourceError
from patchkit.runtime.envfile.syntax import Format

_NAME = r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
# The subset that sh, systemd and docker read alike: see syntax.py.
_PLAIN_LINE = re.compile(rf"{_NAME}=(?P<value>[A-Za-z0-9_@%+=:,./^-]*)")
# Quoted, escaped, or a character by which a shell neither expands nor ends a word.
_SH_PIECE = r"""'[^']*'|"(?:[^"\\$`]|\\.)*"|\\[^\n]|[^\s'"\\$`;&|<>()~*?\[]"""
# Only behind export a name may stand alone: it then passes on what the caller has.
_SH_STATEMENT = re.compile(
    rf"[ \t]*(?P<export>export[ \t]+)?{_NAME}(?(export)|(?==))"
    rf"(?:=(?P<value>(?:{_SH_PIECE})*))?"
    r"(?:[ \t]+#[^\n]*|[ \t]*)(?:\n|\Z)",
    re.DOTALL,
)
_SH_PIECES = re.compile(_SH_PIECE, re.DOTALL)
_SYSTEMD_KEY = re.compile(rf"[ \t]*{_NAME}[ \t]*=")
_SYSTEMD_QUOTED = re.compile(
    r"""[ \t]*(?:'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)")""", re.DOTALL
)
# Behind a backslash a line goes on, as systemd.exec(5) has it for EnvironmentFile=.
_SYSTEMD_RAW = re.compile(r"[ \t]*(?P<raw>(?:\\.|[^\\\r\n])*)(?P<open>\\?)(?:[\r\n]|\Z)", re.DOTALL)
_SETS = re.compile(rf"""[ \t]*(?:export[ \t]+)?"?{_NAME}"?[ \t]*[=:]""")  # in any format
_SKIPPED = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)")
_SYSTEMD_SKIPPED = re.compile(r"[ \t\r\n]*(?:[#;][^\r\n]*(?:[\r\n]|\Z)|[\r\n]|\Z)")


def parse(kind: Format, text: str, where: str) -> dict[str, str]:
    """Return the variables that a file sets, without those that it only refers to.

    Raises SourceError, naming ``where:line``.
    """
    readers: dict[Format, Callable[[str, str], Iterator[tuple[str, str]]]] = {
        Format.ENV: _read_env,
        Format.SH: _read_sh,
        Format.SYSTEMD: _read_systemd,
        Format.DOCKER: _read_docker,
    }
    return dict(readers[kind](text, where))


def lines_of(text: str) -> dict[str, int]:
    """Return the number of the last line that sets each name, as far as lines alone show it."""
    lines = enumerate(text.split("\n"), 1)
    return {match["name"]: number for number, line in lines if (match := _SETS.match(line))}


def _read_env(text: str, where: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line or line.startswith("#"):
            continue
        match = _PLAIN_LINE.fullmatch(line)
        if match is None:
            _refuse_line(where, number, "is not NAME=value with plain characters only")
        yield match["name"], match["value"]


def _read_sh(text: str, where: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        if match := _SKIPPED.match(text, position):
            position = match.end()
            continue
        match = _SH_STATEMENT.match(text, position)
        if match is None:
            _refuse_line(
                where,
                _line_number(text, position),
                "is not one assignment, or needs a shell to read",
            )
        position = match.end()
        if match["value"] is not None:
            pieces = _SH_PIECES.findall(match["value"])
            yield match["name"], "".join(map(_unquote_piece, pieces))


def _unquote_piece(piece: str) -> str:
    if piece.startswith("'"):
        return piece[1:-1]
    if piece.startswith('"'):
        # In double quotes a backslash escapes these alone; with a newline both vanish (POSIX sh).
        return re.sub(r'\\([$`"\\\n])', lambda each: each[1].strip("\n"), piece[1:-1])
    return piece.removeprefix("\\")


def _read_systemd(text: str, where: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        if match := _SYSTEMD_SKIPPED.match(text, position):
            position = match.end()
            if match[0].rstrip("\r\n").endswith("\\"):
                line = _line_number(text, position - 1)
                _refuse_line(where, line, "swallows the next line before systemd 254")
            continue
        key = _SYSTEMD_KEY.match(text, position)
        if key is None:
            _refuse_line(
                where,
                _line_number(text, position),
                "is not NAME=value; systemd ignores it in silence",
            )
        position, parts = key.end(), []
        while match := _SYSTEMD_QUOTED.match(text, position):
            position = match.end()
            parts.append(_systemd_unquoted(match))
        raw = _SYSTEMD_RAW.match(text, position)
        if raw is None or raw["raw"][:1] in {"'", '"'}:
            _refuse_line(where, _line_number(text, position), "has a quote that is not closed")
        position = raw.end()
        yield key["name"], "".join([*parts, _systemd_raw(raw["raw"], kept=bool(raw["open"]))])


def _systemd_unquoted(match: re.Match[str]) -> str:
    if match["double"] is None:
        return match["single"]
    return re.sub(r'\\(["$\\`\n])', lambda each: each[1].strip("\n"), match["double"])


def _systemd_raw(raw: str, *, kept: bool) -> str:
    """Return text outside of quotes: without blanks at its end and without escaped line ends.

    Before a backslash that ends the file the blanks are ``kept``.
    """
    pieces = re.findall(r"\\.|[^\\]", raw, re.DOTALL)
    while not kept and pieces and pieces[-1] in {" ", "\t"}:
        pieces.pop()
    return "".join("" if each in {"\\\n", "\\\r"} else each[-1] for each in pieces)


def _read_docker(text: str, where: str) -> Iterator[tuple[str, str]]:
    # As docker does: no BOM, no CR at the end, no blanks before a name.
    for number, whole in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        line = whole.removesuffix("\r").lstrip()
        if not line or line.startswith("#"):
            continue
        name, sign, value = line.partition("=")
        if not re.fullmatch(_NAME, name):
            _refuse_line(where, number, f"has {name!r} in the place of a name")
        if sign:  # a name alone takes the caller's value
            yield name, value


def _refuse_line(where: str, number: int, what: str) -> NoReturn:
    raise SourceError(
        f"{where}:{number}: {what}",
        hint="write the file anew with `patchkit env`, or name the format that it has",
    )


def _line_number(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
