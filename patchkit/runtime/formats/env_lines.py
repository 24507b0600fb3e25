"""Read env files: lines of NAME=value, as sh, systemd and docker take them."""

from __future__ import annotations

import re

from patchkit.runtime.files.collected import Collected
from patchkit.runtime.files.content import How
from patchkit.runtime.files.value import known

_LINE = re.compile(r"[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_]\w*)(?:=(?P<value>.*))?")
# Single quotes, double quotes, an escaped character, bare text, and a quote that is not closed.
_PIECES = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)|([^'"\\]+)|(.)""", re.DOTALL)


def read_env_lines(text: str, found: Collected) -> None:
    """Add the variables of an env file; a name without a value is the caller's."""
    for number, line in enumerate(text.split("\n"), 1):
        match = _LINE.fullmatch(without_comment(line))
        if match is None:
            continue
        if match["value"] is None:
            found.pass_on(match["name"], number, How.LINE)
        else:
            value = known(_unquoted(match["value"].strip()), number)
            found.set(match["name"], value, number, How.LINE)


def without_comment(line: str) -> str:
    """Return a line up to the # that begins a comment."""
    if line.lstrip().startswith(("#", ";")):
        return ""
    if "#" not in line:
        return line
    quote = ""
    for position, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        # Inside of a word # begins no comment.
        elif character == "#" and line[position - 1] in " \t":
            return line[:position].rstrip()
    return line


def _unquoted(raw: str) -> str:
    return "".join(
        single or re.sub(r"\\(.)", r"\1", double) or escaped or bare or odd
        for single, double, escaped, bare, odd in _PIECES.findall(raw)
    )
