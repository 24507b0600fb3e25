"""Read env files as `patchkit env` writes them, in each format.

Stricter than the programs that take them: what one of these would skip in silence, run, expand or
read otherwise than the others is an error.
"""

from __future__ import annotations

import re

from patchkit.errors import SourceError
from patchkit.runtime.envfile.syntax import Format

_NAME = r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
_PLAIN = r"(?P<plain>[A-Za-z0-9_@%+=:,./^-]*)"  # what sh, systemd and docker read alike
_SINGLE = r"(?P<quoted>(?:'[^']*'|\\')+)"
_FORMS = {
    Format.ENV: (rf"{_NAME}={_PLAIN}", "NAME=value with plain characters only"),
    # Only behind export a name may stand alone: it then passes on what the caller has.
    Format.SH: (
        rf"(?P<export>export[ \t]+)?{_NAME}(?(export)|(?==))(?:=(?:{_SINGLE}|{_PLAIN}))?",
        "one assignment that no shell is needed for: export NAME='value'",
    ),
    Format.SYSTEMD: (
        rf"""{_NAME}=(?:"(?P<quoted>(?:[^"\\$`]|\\["\\$`])*)"|{_PLAIN})""",
        'NAME="value" in one pair of quotes, and systemd skips what it cannot read in silence',
    ),
    Format.DOCKER: (rf"{_NAME}(?:=(?P<plain>[^\r\n]*))?", "NAME=value or NAME"),
}
# systemd ends a comment at a CR, and before 254 a backslash at its end swallows the next line.
_SKIPPED = re.compile(r"[ \t]*(?:#[^\r\n]*(?<!\\))?(?:\n|\Z)")
_PIECES = re.compile(r"'([^']*)'|\\(')")
_SETS = re.compile(rf"(?:export[ \t]+)?{_NAME}=")


def parse(kind: Format, text: str, where: str) -> dict[str, str]:
    """Return the variables that a file sets, without those that it only refers to.

    Raises SourceError, naming ``where:line``.
    """
    form, words = _FORMS[kind]
    statement = re.compile(rf"(?:{form})(?:\n|\Z)")
    found: dict[str, str] = {}
    position = 0
    while position < len(text):
        match = _SKIPPED.match(text, position) or statement.match(text, position)
        if match is None:
            raise SourceError(
                f"{where}:{text.count(chr(10), 0, position) + 1}: is not {words}",
                hint="write the file anew with `patchkit env`, or name the format that it has",
            )
        position = match.end()
        parts = match.groupdict()
        if (quoted := parts.get("quoted")) is not None:
            found[parts["name"]] = (
                re.sub(r"\\(.)", r"\1", quoted)
                if kind is Format.SYSTEMD
                else "".join(inner or sign for inner, sign in _PIECES.findall(quoted))
            )
        elif parts.get("plain") is not None:
            found[parts["name"]] = parts["plain"]
    return found


def lines_of(text: str) -> dict[str, int]:
    """Return the number of the last line that sets each name, as far as lines alone show it."""
    lines = enumerate(text.split("\n"), 1)
    return {match["name"]: number for number, line in lines if (match := _SETS.match(line))}
