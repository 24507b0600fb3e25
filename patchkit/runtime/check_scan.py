"""Variables that any env file or script sets, found by how they are written.

Nothing is run or expanded. The forms: lines of env files; words of shell scripts, `docker run -e`,
Dockerfiles and units; maps and lists of YAML; JSON; `os.environ` of Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from patchkit.runtime.secret_names import masked

_SHOWN = 60  # characters of a value
_NAME = r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
_WORD = r"""(?P<value>(?:'[^'\n]*'|"(?:[^"\\\n]|\\.)*"|\\[^\n]|[^\s'"\\;|&`])*)"""
_QUOTED = r"""(?P<value>"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
_FORMS = [
    re.compile(form, re.MULTILINE)
    for form in (
        rf"(?:^|(?<=[\s;&|(])|(?<=--env=)|(?<=\bEnvironment=)){_NAME}={_WORD}",
        rf"(?<!\w)(?P<quote>[\"']){_NAME}=(?P<value>[^\"'\n]*)(?P=quote)",
        rf"\$\{{{_NAME}:?=(?P<value>[^}}\n]*)\}}",
        rf"^[ \t]*ENV[ \t]+{_NAME}[ \t]+(?P<value>[^\n]+)",
        rf"^[ \t]*(?:-[ \t]+)?{_NAME}:[ \t]+(?P<value>[^\n]*\S)",
        rf"(?P<quote>[\"']){_NAME}(?P=quote)[ \t]*:[ \t]*{_QUOTED}",
        rf"environ\[(?P<quote>[\"']){_NAME}(?P=quote)\][ \t]*=[ \t]*(?P<value>[^\s=][^\n]*)",
        rf"environ\.setdefault\((?P<quote>[\"']){_NAME}(?P=quote),[ \t]*(?P<value>[^\n)]*)",
        rf"^[ \t]*-[ \t]+name:[ \t]*{_NAME}[ \t]*\n[ \t]*value:[ \t]*(?P<value>[^\n]*)",
    )
]
_ENV_LINE = re.compile(rf"[ \t]*{_NAME}(?:=(?P<value>.*))?")
_PIECES = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)|([^'"\\]+)|(.)""", re.DOTALL)
_SPEECH = re.compile(r"[ \t]*(echo|printf|log|info|warn|die)\b[^>\n]*$")


@dataclass(frozen=True, slots=True)
class Found:
    """A variable that is set. ``literal``: a reader needs no shell to know the value.

    ``top``: the line is not indented, so in no branch, loop or service of its own.
    """

    line: int
    name: str
    value: str
    literal: bool = True
    top: bool = True

    @property
    def shown(self) -> str:
        """``NAME=value`` to be told, without the value of a secret."""
        short = self.value if len(self.value) <= _SHOWN else f"{self.value[:_SHOWN]}…"
        return masked(f"{self.name}={short}")


def scan(text: str, where: str) -> tuple[Found, ...]:
    """Every variable that is set, in the order of the file; comments are left out."""
    lines = text.replace("\r\n", "\n").split("\n")
    plain = "\n".join(map(without_comment, lines))
    found = _env_lines(plain) if is_env_file(text, where) else _forms(plain)
    unique = {(each.line, each.name, each.value): each for each in found}
    return tuple(sorted(unique.values(), key=lambda each: each.line))


def is_env_file(text: str, where: str) -> bool:
    """Whether it is a list of NAME=value and nothing else, as systemd and docker read it."""
    script = PurePath(where).suffix in {".sh", ".bash", ".py"} or text.startswith("#!")
    lines = [line for line in text.splitlines() if line.strip() and not _is_comment(line)]
    return not script and bool(lines) and all(_ENV_LINE.fullmatch(line) for line in lines)


def without_comment(line: str) -> str:
    """A line up to the # that begins a comment; of a line that only talks, nothing."""
    if _is_comment(line) or _SPEECH.match(line):
        return ""
    quote = ""
    for position, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and line[position - 1] in " \t":
            return line[:position].rstrip()
    return line


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith(("#", ";"))


def _env_lines(text: str) -> Iterator[Found]:
    for number, line in enumerate(text.split("\n"), 1):
        match = _ENV_LINE.fullmatch(line)
        if match and match["value"] is not None:
            yield _found(number, match["name"], match["value"].strip(), top=True)


def _forms(text: str) -> Iterator[Found]:
    for form in _FORMS:
        for match in form.finditer(text):
            start = match.start("name")
            line = text[text.rfind("\n", 0, start) + 1 : start]
            number = text.count("\n", 0, start) + 1
            yield _found(number, match["name"], match["value"], top=line[:1] not in {" ", "\t"})


def _found(number: int, name: str, raw: str, *, top: bool) -> Found:
    pieces = _PIECES.findall(raw)
    value = "".join(
        single or re.sub(r"\\(.)", r"\1", double) or escaped or bare or odd
        for single, double, escaped, bare, odd in pieces
    )
    open_ = "".join(double + bare for _, double, _, bare, _ in pieces)
    literal = not re.search(r"\$|`|\{\{", open_) and not re.match(r"[a-z_]+[.(\[]", open_)
    return Found(number, name, value, literal, top)
