"""Check for secrets, servers open to everybody, and lines that tools read differently."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from patchkit.finding import Finding, Level
from patchkit.runtime.lint.scan import Assignment, Commands, is_env_file, without_comment
from patchkit.runtime.rules.sensitive_names import is_secret, secret_file

_OTHERS = 0o077  # rights of the group and of others
_DASHBOARD = re.compile(r"--dashboard-host[= ]+[\"']?(0\.0\.0\.0|::)(?![\w.:])")
_SERVE = re.compile(r"vllm serve\b[^\n]*")
_OPEN_HOST = re.compile(r"--host[= ]+[\"']?(0\.0\.0\.0|::)(?![\w.:])")
_ASSIGNED = re.compile(r"\s*(?P<export>export\s+)?(?P<name>\w+)=(?P<value>.*)")


def check_secret(assigned: Assignment, mode: int | None) -> Iterator[Finding]:
    """Return a secret in a file; ``mode`` are the file's rights, None for standard input."""
    if not is_secret(assigned.name) or not assigned.is_given:
        return
    open_to = mode is not None and bool(mode & _OTHERS)
    file = secret_file(assigned.name)
    yield Finding(
        line=assigned.line,
        about=assigned.name,
        level=Level.ERROR if open_to else Level.WARNING,
        what=f"the value of {assigned.name} is in the file"
        + (f", which others may read ({mode:04o})" if open_to else ""),
        why="Files are copied to other nodes, shown and committed.",
        hint=f"keep it in a file of mode 0600 that {file} names"
        if file
        else "hand it over apart: in a file of mode 0600, or from the caller's environment",
    )


def check_servers(text: str) -> Iterator[Finding]:
    """Return servers that listen on every interface."""
    commands = Commands(text)
    joined = commands.joined
    for match in _DASHBOARD.finditer(joined):
        yield Finding(
            line=commands.line(match.start()),
            level=Level.WARNING,
            what=f"{match[0]}: Ray's dashboard on every interface",
            why="Whoever reaches it runs programs here: it asks for no password.",
            hint="leave it out, which is 127.0.0.1, or name the address between the nodes",
            source="Ray's documentation on security",
        )
    locked = "--api-key" in joined or "VLLM_API_KEY" in joined
    for match in () if locked else _SERVE.finditer(joined):
        if _OPEN_HOST.search(joined, *match.span()):
            yield Finding(
                line=commands.line(match.start()),
                level=Level.NOTE,
                what="vllm serve on every interface, and without a key",
                why="Whoever reaches the port may use the model.",
                hint="name an address with --host, or set VLLM_API_KEY",
            )


def check_reading(text: str, where: str, kind: str) -> Iterator[Finding]:
    """Return what sh, systemd and docker read differently; ``kind`` is the format, if known.

    Each kind of difference is reported once: its first line, and how many there are.
    """
    if kind:  # a file of patchkit's own says for which program it was written
        return
    if "\r\n" in text:
        yield _differently(_CRLF, [(1, "the file")])
    if not is_env_file(text, where):
        return
    places: dict[_Difference, list[tuple[int, str]]] = {}
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        match = _ASSIGNED.fullmatch(line)
        for difference in _differences(line, match) if match else ():
            places.setdefault(difference, []).append((number, match["name"] if match else ""))
    for difference, where_ in places.items():
        yield _differently(difference, where_)


@dataclass(frozen=True, slots=True)
class _Difference:
    what: str
    why: str
    level: Level = Level.WARNING


_CRLF = _Difference("lines end with CR LF", "For sh and docker compose, CR is part of the values.")
_EXPORT = _Difference("export", "systemd and docker take no export, and sh needs none: set -a.")
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
