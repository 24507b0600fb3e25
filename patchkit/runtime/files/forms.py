"""Find the variables that any env file or script sets, by how they are written.

Nothing is run or expanded. The forms: lines of env files; words of shell scripts, `docker run -e`,
Dockerfiles and units; maps and lists of YAML; JSON; `os.environ` of Python.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from patchkit.runtime.files.content import Assignment

_NAME = r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
_WORD = r"""(?P<value>(?:'[^'\n]*'|"(?:[^"\\\n]|\\.)*"|\\[^\n]|[^\s'"\\;|&`])*)"""
_QUOTED = r"""(?P<value>"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
_FORMS = [
    re.compile(form, re.MULTILINE)
    for form in (
        # NAME=value of shells, Dockerfiles and docker's --env; Environment= of units
        rf"(?:^|(?<=[\s;&|(])|(?<=--env=)|(?<=\bEnvironment=))(?!Environment=){_NAME}={_WORD}",
        # "NAME=value", quoted as a whole, as in lists of YAML and JSON
        rf"(?<!\w)(?P<quote>[\"']){_NAME}=(?P<value>[^\"'\n]*)(?P=quote)",
        # ${NAME:=value} of shells
        rf"\$\{{{_NAME}:?=(?P<value>[^{{}}\n]*)(?=[{{}}])",
        # ENV NAME value, Dockerfile's older form
        rf"^[ \t]*ENV[ \t]+{_NAME}[ \t]+(?P<value>[^\n]+)",
        # NAME: value of YAML; a _ in the name tells variables from other keys
        rf"^[ \t]*(?:-[ \t]+)?(?=\w+_){_NAME}:[ \t]+(?P<value>\S[^\n]*)",
        # "NAME": "value" of JSON and of Python's dicts
        rf"(?P<quote>[\"']){_NAME}(?P=quote)[ \t]*:[ \t]*{_QUOTED}",
        # os.environ["NAME"] = value, and setdefault
        rf"environ\[(?P<quote>[\"']){_NAME}(?P=quote)\][ \t]*=[ \t]*(?P<value>[^\s=][^\n]*)",
        rf"environ\.setdefault\((?P<quote>[\"']){_NAME}(?P=quote),[ \t]*(?P<value>[^\n)]*)",
        # name: and value: on two lines, as Kubernetes has them
        rf"^[ \t]*-[ \t]+name:[ \t]*{_NAME}[ \t]*\n[ \t]*value:[ \t]*(?P<value>[^\n]*)",
    )
]
_CALL = re.compile(r"[A-Za-z_][\w.]*[(\[]")
# Lines that count for all that follows; another one sets its variables for its own command.
_SETS = re.compile(rf"(export|ENV|Environment=|os\.environ|: \"|{_NAME}=)")
_ENV_LINE = re.compile(rf"[ \t]*(?!Environment=){_NAME}(?:=(?P<value>.*))?")
# Single quotes, double quotes, an escaped character, bare text, and a quote that is not closed.
_PIECES = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)|([^'"\\]+)|(.)""", re.DOTALL)
# Lines that only print; with > they may write a file that sets variables.
_SPEECH = re.compile(r"[ \t]*(echo|printf|log|info|warn|die)\b[^>\n]*$")


def scan(text: str, where: str) -> tuple[Assignment, ...]:
    """Return every variable that is set, in the order of the file; comments are left out."""
    lines = list(map(without_comment, _variables(text.replace("\r\n", "\n")).split("\n")))
    found = _env_lines(lines) if is_env_file(text, where) else _forms(lines, where)
    # Two forms may match the same assignment.
    unique = {(each.line, each.name, each.value): each for each in found}
    return tuple(sorted(unique.values(), key=lambda each: each.line))


def is_env_file(text: str, where: str) -> bool:
    """Return whether a text is a list of NAME=value alone, as systemd and docker read it."""
    script = PurePath(where).suffix in {".sh", ".bash", ".py"} or text.startswith("#!")
    lines = [line for line in text.splitlines() if line.strip() and not _is_comment(line)]
    return not script and bool(lines) and all(_ENV_LINE.fullmatch(line) for line in lines)


def without_comment(line: str) -> str:
    """Return a line up to the # that begins a comment; of a line that only prints, nothing."""
    if _is_comment(line) or _SPEECH.match(line):
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


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith(("#", ";"))


def _variables(text: str) -> str:
    """Return only the variables of patchkit's own JSON: their names also stand beside reasons."""
    start, end = text.find('"variables": {'), text.find('"reasons": {')
    if not text.startswith("{") or not -1 < start < end:
        return text
    # Empty lines before it keep the numbers of lines.
    return "\n" * text.count("\n", 0, start) + text[start:end]


def _env_lines(lines: Sequence[str]) -> Iterator[Assignment]:
    for number, line in enumerate(lines, 1):
        match = _ENV_LINE.fullmatch(line)
        if match and match["value"] is not None:
            yield Assignment(number, match["name"], *_value(match["value"].strip()))


def _forms(lines: Sequence[str], where: str) -> Iterator[Assignment]:
    text = "\n".join(lines)
    number_of = Lines(text)
    python = PurePath(where).suffix == ".py"
    blocks = _blocks(lines)
    for form in _FORMS:
        for match in form.finditer(text):
            number = number_of(match.start("name"))
            value, literal = _value(match["value"].rstrip())
            literal = literal and not (python and _CALL.match(match["value"]))
            yield Assignment(number, match["name"], value, literal, blocks[number - 1])


def _value(raw: str) -> tuple[str, bool]:
    """Return a value without its quotes, and whether nothing in it is to be expanded."""
    pieces = _PIECES.findall(raw)
    value = "".join(
        single or re.sub(r"\\(.)", r"\1", double) or escaped or bare or odd
        for single, double, escaped, bare, odd in pieces
    )
    # Single quotes and a backslash keep a $ as it is.
    expanded = "".join(double + bare for _, double, _, bare, _ in pieces)
    return value, not re.search(r"\$|`|\{\{", expanded)


def _blocks(lines: Sequence[str]) -> list[int]:
    """Return for each line the last one above that is indented less; itself for one command."""
    above: list[tuple[int, int]] = []
    blocks = []
    for number, line in enumerate(lines, 1):
        own = len(line) - len(line.lstrip())
        while above and line.strip() and above[-1][0] >= own:
            above.pop()
        blocks.append(above[-1][1] if above else 0 if _SETS.match(line) else number)
        if line.strip():
            above.append((own, number))
    return blocks


class Lines:
    """Translate positions in a text to numbers of lines, from 1; the text is read once."""

    def __init__(self, text: str) -> None:
        self._ends = [match.start() for match in re.finditer("\n", text)]

    def __call__(self, position: int) -> int:
        return bisect_left(self._ends, position) + 1


class Commands:
    """The commands of a script, each in one line: continued lines are joined, comments cut.

    Two blanks stand for a backslash and a line break, so that positions stay.
    """

    def __init__(self, text: str) -> None:
        self._lines = "\n".join(map(without_comment, text.split("\n")))
        self.joined = self._lines.replace("\\\n", "  ")
        self.line = Lines(self._lines)
