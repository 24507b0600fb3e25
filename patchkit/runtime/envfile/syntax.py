"""Write one variable in each format of env files, and say what a format can hold.

Every consumer has rules of its own: a shell expands and splits, systemd unquotes, docker takes the
rest of the line as it is. A value that a format cannot hold is refused, never bent.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from enum import StrEnum

from patchkit.errors import UsageError
from patchkit.quoting import quoted
from patchkit.runtime.rules.sensitive_names import is_secret, secret_file

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # POSIX.1-2024, base definitions 8.1
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./^-]*")
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


@dataclass(frozen=True, slots=True)
class EnvEntry:
    """A variable. ``comment`` is its reason; a secret has an empty ``value``."""

    name: str
    value: str
    comment: str = ""


def check(kind: Format, entry: EnvEntry) -> None:
    """Raise UsageError, without the value, if the format cannot hold the variable."""
    if not _NAME.fullmatch(entry.name):
        raise UsageError(
            f"{entry.name!r} is not the name of a variable",
            hint="take ASCII letters, digits and _, with no digit first",
        )
    if is_secret(entry.name) and entry.value:
        raise UsageError(
            f"{entry.name}: the value of a secret is not written to a file",
            hint="leave the value empty: the file then refers to it",
        )
    if trouble := _format_trouble(kind, entry.name, entry.value):
        able = [each for each in Format if not _format_trouble(each, entry.name, entry.value)]
        raise UsageError(
            f"{entry.name}: {trouble}",
            why=f"the format {kind} has no way to write it" if able else "",
            hint=f"--format {', '.join(able)} can" if able else "no format can hold it",
        )


def assignment(kind: Format, entry: EnvEntry) -> str:
    """Return the lines that set a variable, or refer to a secret. Raises UsageError."""
    check(kind, entry)
    if is_secret(entry.name):
        return _secret_reference(kind, entry.name)
    if kind is Format.SH:
        value = entry.value.replace("'", r"'\''")
        return f"export {entry.name}='{value}'"
    if kind is Format.SYSTEMD:
        value = re.sub(r'(["$\\`])', r"\\\1", entry.value)
        return f'{entry.name}="{value}"'
    return f"{entry.name}={entry.value}"


def comment(text: str) -> list[str]:
    """Return comment lines, which nothing in the text can end: each starts with ``# ``.

    systemd before 254 takes a backslash at the end of a comment for a continuation, which would
    swallow the variable below it.
    """
    # Less "# ".
    lines = textwrap.wrap(one_line(text), _WIDTH - 2, break_on_hyphens=False)
    return [f"# {line}." if line.endswith("\\") else f"# {line}" for line in lines]


def one_line(text: str) -> str:
    """Return a text without line breaks, control characters and other invisible characters."""
    return "".join(each if each.isprintable() else "?" for each in " ".join(text.split()))


def refers(name: str) -> str:
    """Return where a secret comes from, in a sentence."""
    file = secret_file(name)
    other = (
        f", or from the file that {file} names, and then in no environment at all" if file else ""
    )
    return f"{name} is a secret: it comes from the caller's environment{other}."


def _secret_reference(kind: Format, name: str) -> str:
    if kind is Format.SH:
        return "\n".join([*comment(refers(name)), f"export {name}"])
    if kind is Format.DOCKER:
        return "\n".join([*comment(refers(name)), name])
    file = secret_file(name)
    how = {
        Format.ENV: f"{name} is a secret and not written here: hand it over apart, as in "
        f"`{quoted('docker', 'run', '-e', name)}` or `{quoted('export', name)}`",
        Format.SYSTEMD: f"{name} is a secret and not written here: give the unit another "
        "EnvironmentFile= of mode 0600, or LoadCredential=",
    }[kind]
    other = f"; or name a file that holds it in {file}" if file else ""
    return "\n".join(comment(f"{how}{other}."))


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
    if kind is Format.ENV and (odd := sorted(set(_PLAIN.sub("", value)))):
        return f"the value holds {', '.join(map(repr, odd[:5]))}, which not every tool reads alike"
    if kind is Format.SYSTEMD and (odd := sorted(filter(_foreign_to_systemd, set(value)))):
        return f"the value holds {', '.join(map(repr, odd[:5]))}, which systemd does not take"
    if kind is Format.DOCKER and re.search(r"[\r\n]", value):
        return "the value holds a line break, and docker knows no quotes"
    if kind is Format.DOCKER and size > _DOCKER_LONGEST:
        return f"{size:,} bytes are more than docker reads of a line"
    return ""


def _foreign_to_systemd(character: str) -> bool:
    """Return whether any systemd refuses a character: systemd.exec(5); old ones, control ones."""
    code = ord(character)
    control = code < 0x20 or 0x7F <= code < 0xA0
    nothing = 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE  # noncharacters of Unicode
    return (control and character not in "\t\n") or nothing or code == 0xFEFF
