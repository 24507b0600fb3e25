"""Write and read variables in each format of env files, and say what a format can hold.

Each program has rules of its own: a shell expands and splits, systemd unquotes, docker takes the
rest of the line as it is. A value that a format cannot hold is refused, never changed. Reading is
stricter than these programs: a line that one of them would ignore, run, expand or read in another
way than the others is an error.
"""

import re
import shlex
import textwrap
from enum import StrEnum

from patchkit.frozen import Values, positional
from patchkit.runtime.rules.releases import read_env_data, refusal
from patchkit.runtime.rules.secret_texts import is_secret

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"  # POSIX.1-2024, base definitions 8.1
_FORMS = read_env_data("formats")
_WIDTH = 100  # columns of a comment
_SHOWN = 5  # characters in a message
_UNFIT = "[\0\ud800-\udfff]"


class Format(StrEnum):
    """Formats of env files; ``env`` is the subset that sh, systemd and docker read the same."""

    ENV = "env"
    SH = "sh"
    SYSTEMD = "systemd"
    DOCKER = "docker"


_OF_SHELLS = (Format.ENV, Format.SH)

# systemd ends a comment at a CR, and before 254 a backslash at its end swallows the next line.
_SKIPPED = re.compile(r"[ \t]*(?:#[^\r\n]*(?<!\\))?(?:\n|\Z)")


@positional
class EnvEntry:
    """A variable to write; ``comment`` says why it is set. A secret has an empty ``value``."""

    name: str
    value: str
    comment: str = ""


def render_assignment(kind: Format, entry: EnvEntry) -> str:
    """Return the line that sets a variable, or the lines that say where a secret comes from.

    Raise UsageError if the name is invalid, a secret has a value, or the format cannot hold it.
    """
    name = entry.name
    if not re.fullmatch(_NAME, name):
        raise refusal("no-name", name=name)
    if is_secret(name) and entry.value:
        raise refusal("secret-value", name=name)
    if trouble := _format_trouble(kind, name, entry.value):
        formats = [
            form for form in Format if not _format_trouble(form, name, entry.value)
        ]
        able = ", ".join(formats) or "none"
        raise refusal("value-in-format", name=name, trouble=trouble, able=able)

    if is_secret(name):
        return _refer_to_secret(kind, name)
    match kind:
        case Format.SH:
            value = entry.value.replace("'", r"'\''")
            return f"export {name}='{value}'"
        case Format.SYSTEMD:
            value = re.sub(r'(["$\\`])', r"\\\1", entry.value)
            return f'{name}="{value}"'
        case _:
            return f"{name}={entry.value}"


def _refer_to_secret(kind: Format, name: str) -> str:
    """Return the lines that say where a secret comes from."""
    form = _FORMS[kind]
    file_variable = read_env_data("secrets")["files"].get(name, "")

    text = form["secret"]
    if file_variable:
        text += form["from_file"]

    sentence = f"{name} {text}.".format(name=name, file=file_variable)
    lines = render_comment(sentence)
    if "passes" in form:
        lines.append(form["passes"].format(name=name))

    return "\n".join(lines)


def render_comment(text: str) -> list[str]:
    """Return a text as comment lines: each starts with ``# ``, whatever the text contains.

    None ends with a backslash: systemd before 254 would take the variable below for a part of
    the comment.
    """
    one_line = " ".join(text.split())
    signs = [sign if sign.isprintable() else "?" for sign in one_line]
    width = _WIDTH - len("# ")

    lines = textwrap.wrap("".join(signs), width, break_on_hyphens=False)
    return [f"# {line}." if line.endswith("\\") else f"# {line}" for line in lines]


def _format_trouble(kind: Format, name: str, value: str) -> str:
    """Return why the format cannot hold a value, "" if it can."""
    if re.search(_UNFIT, value):
        return "the value holds a NUL, or half a surrogate pair, which is not UTF-8"
    if kind in _OF_SHELLS and re.fullmatch(_FORMS["shell"]["owns"], name):
        return "a shell sets this variable itself"

    form = _FORMS[kind]
    if odd_signs := set(re.findall(form["odd"], value)):
        shown = ", ".join(map(repr, sorted(odd_signs)[:_SHOWN]))
        return f"the value holds {shown}, {form['why']}"

    return ""


def parse_assignments(kind: Format, text: str, where: str) -> Values:
    """Return name → value of the variables that a file sets.

    Raise SourceError, which names ``where`` and the line, for a line that is no assignment.
    """
    statement = re.compile(rf"(?:{_FORMS[kind]['line']})(?:\n|\Z)")
    variables: dict[str, str] = {}
    position = 0

    while position < len(text):
        match = _SKIPPED.match(text, position) or statement.match(text, position)
        if match is None:
            line = text.count("\n", 0, position) + 1
            raise refusal(
                "no-assignment", file=where, line=line, takes=_FORMS[kind]["takes"]
            )
        position = match.end()
        parts = match.groupdict()

        value = parts.get("plain")
        quoted = parts.get("quoted")
        if quoted is not None and kind is Format.SYSTEMD:
            value = re.sub(r"\\(.)", r"\1", quoted)
        elif quoted is not None:
            (value,) = shlex.split(quoted)
        if value is not None:
            variables[parts["name"]] = value

    return variables
