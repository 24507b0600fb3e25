"""Write and read variables in each format of env files, and say what a format can hold.

Every consumer has rules of its own: a shell expands and splits, systemd unquotes, docker takes the
rest of the line as it is. A value that a format cannot hold is refused, never bent. Reading is
stricter than the programs: what one of them would skip in silence, run, expand or read otherwise
than the others is an error.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from enum import StrEnum

from patchkit.errors import SourceError, UsageError
from patchkit.quoting import quoted
from patchkit.runtime.rules.releases import read_env_data
from patchkit.runtime.rules.secret_texts import is_secret

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # POSIX.1-2024, base definitions 8.1
_LAST_OF_PLANES = "".join(chr(plane << 16 | end) for plane in range(17) for end in (0xFFFE, 0xFFFF))
# Shells set these themselves, make them read-only, or run by them.
_SHELL_OWNS = re.compile(
    r"_|BASH.*|DIRSTACK|EPOCH(REALTIME|SECONDS)|E?UID|FUNCNAME|GROUPS|HISTCMD|IFS|LINENO|OLDPWD|"
    r"OPTARG|OPTIND|PIPESTATUS|PPID|PWD|S?RANDOM|SECONDS|SHELLOPTS|SHLVL"
)
_LONGEST = 131_071  # bytes of NAME=value: MAX_ARG_STRLEN of Linux less its NUL
_DOCKER_LONGEST = 65_535  # bytes of a line: bufio.MaxScanTokenSize of Go less the newline
_WIDTH = 100  # columns of a comment


class Format(StrEnum):
    """``env`` is the subset that sh, systemd and docker read alike."""

    ENV = "env"
    SH = "sh"
    SYSTEMD = "systemd"
    DOCKER = "docker"


# What a value cannot hold, and why. systemd.exec(5): no control characters, no noncharacters.
_ODD = {
    Format.ENV: (r"[^A-Za-z0-9_@%+=:,./^-]", "which not every tool reads alike"),
    Format.SYSTEMD: (
        f"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufdd0-\ufdef\ufeff{_LAST_OF_PLANES}]",
        "which systemd does not take",
    ),
    Format.DOCKER: (r"[\r\n]", "a line break, and docker knows no quotes"),
}

_NAMED = r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
_PLAIN = r"(?P<plain>[A-Za-z0-9_@%+=:,./^-]*)"  # what sh, systemd and docker read alike
_SINGLE = r"(?P<quoted>(?:'[^']*'|\\')+)"
_FORMS = {
    Format.ENV: (rf"{_NAMED}={_PLAIN}", "NAME=value with plain characters only"),
    # Only behind export a name may stand alone: it then passes on what the caller has.
    Format.SH: (
        rf"(?P<export>export[ \t]+)?{_NAMED}(?(export)|(?==))(?:=(?:{_SINGLE}|{_PLAIN}))?",
        "one assignment that no shell is needed for: export NAME='value'",
    ),
    Format.SYSTEMD: (
        rf"""{_NAMED}=(?:"(?P<quoted>(?:[^"\\$`]|\\["\\$`])*)"|{_PLAIN})""",
        'NAME="value" in one pair of quotes, and systemd skips what it cannot read in silence',
    ),
    Format.DOCKER: (rf"{_NAMED}(?:=(?P<plain>[^\r\n]*))?", "NAME=value or NAME"),
}
# systemd ends a comment at a CR, and before 254 a backslash at its end swallows the next line.
_SKIPPED = re.compile(r"[ \t]*(?:#[^\r\n]*(?<!\\))?(?:\n|\Z)")
_PIECES = re.compile(r"'([^']*)'|\\(')")


@dataclass(frozen=True, slots=True)
class EnvEntry:
    """A variable. ``comment`` is its reason; a secret has an empty ``value``."""

    name: str
    value: str
    comment: str = ""


def assignment(kind: Format, entry: EnvEntry) -> str:
    """Return the lines that set a variable, or refer to a secret. Raises UsageError."""
    name = entry.name
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not the name of a variable",
            hint="take ASCII letters, digits and _, with no digit first",
        )
    if is_secret(name) and entry.value:
        raise UsageError(
            f"{name}: the value of a secret is not written to a file",
            hint="leave the value empty: the file then refers to it",
        )
    if trouble := _format_trouble(kind, name, entry.value):
        able = [other for other in Format if not _format_trouble(other, name, entry.value)]
        raise UsageError(
            f"{name}: {trouble}",
            why=f"the format {kind} has no way to write it" if able else "",
            hint=f"--format {', '.join(able)} can" if able else "no format can hold it",
        )
    if is_secret(name):
        file = read_env_data("secrets")["files"].get(name, "")
        other = f"; or name a file that holds it in {file}" if file else ""
        text = {
            Format.ENV: "is a secret and not written here: hand it over apart, as in "
            f"`{quoted('docker', 'run', '-e', name)}` or `{quoted('export', name)}`",
            Format.SYSTEMD: "is a secret and not written here: give the unit another "
            "EnvironmentFile= of mode 0600, or LoadCredential=",
        }.get(kind, "is a secret: it comes from the caller's environment")
        if file and kind in (Format.SH, Format.DOCKER):
            other = f", or from the file that {file} names, and then in no environment at all"
        taken = {Format.SH: [f"export {name}"], Format.DOCKER: [name]}
        return "\n".join([*comment(f"{name} {text}{other}."), *taken.get(kind, [])])
    if kind is Format.SH:
        value = entry.value.replace("'", r"'\''")
        return f"export {name}='{value}'"
    if kind is Format.SYSTEMD:
        value = re.sub(r'(["$\\`])', r"\\\1", entry.value)
        return f'{name}="{value}"'
    return f"{name}={entry.value}"


def comment(text: str) -> list[str]:
    """Return comment lines, which nothing in the text can end: each starts with ``# ``.

    systemd before 254 takes a backslash at the end of a comment for a continuation, which would
    swallow the variable below it.
    """
    line = "".join(sign if sign.isprintable() else "?" for sign in " ".join(text.split()))
    lines = textwrap.wrap(line, _WIDTH - len("# "), break_on_hyphens=False)
    return [f"# {line}." if line.endswith("\\") else f"# {line}" for line in lines]


def _format_trouble(kind: Format, name: str, value: str) -> str:
    """Return why the format cannot hold a value; empty if it can."""
    # In bytes, as the limits are; half a surrogate pair has a message of its own below.
    size = len(f"{name}={value}".encode(errors="surrogatepass"))
    if "\0" in value:
        return "the value holds a NUL, which no environment variable can"
    if re.search("[\ud800-\udfff]", value):
        return "the value holds half a surrogate pair, which is not UTF-8"
    if size > _LONGEST:
        return f"{size:,} bytes are more than Linux hands to a process in one variable"
    if kind in (Format.ENV, Format.SH) and _SHELL_OWNS.fullmatch(name):
        return "a shell sets this variable itself"
    if kind is Format.DOCKER and size > _DOCKER_LONGEST:
        return f"{size:,} bytes are more than docker reads of a line"
    if kind in _ODD and (odd := sorted({*re.findall(_ODD[kind][0], value)})):
        return f"the value holds {', '.join(map(repr, odd[:5]))}, {_ODD[kind][1]}"
    return ""


def parse(kind: Format, text: str, where: str) -> dict[str, str]:
    """Return the variables that a file sets. Raises SourceError, naming ``where:line``."""
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
