"""What a file should not say at all: secrets, open doors, and lines that tools read differently."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from patchkit.runtime.check_scan import Found, is_env_file, without_comment
from patchkit.runtime.check_values import is_open
from patchkit.runtime.finding import Finding, Severity
from patchkit.runtime.secret_names import is_secret, secret_file

_OTHERS = 0o077
_DASHBOARD = re.compile(r"--dashboard-host[= ]+[\"']?(0\.0\.0\.0|::)(?![\w.:])")
_SERVED = re.compile(r"vllm serve\b[^\n]*--host[= ]+[\"']?(0\.0\.0\.0|::)(?![\w.:])")
_ASSIGNED = re.compile(r"\s*(?P<export>export\s+)?(?P<name>\w+)=(?P<value>.*)")


def check_secret(found: Found, mode: int | None) -> Iterator[Finding]:
    """``mode`` of the file, None if it is none."""
    if not is_secret(found.name) or not found.literal or not found.value or is_open(found.value):
        return
    open_to = mode is not None and bool(mode & _OTHERS)
    file = secret_file(found.name)
    yield Finding(
        line=found.line,
        name=found.name,
        severity=Severity.ERROR if open_to else Severity.WARNING,
        what=f"the value of {found.name} is in the file"
        + (f", which others may read ({mode:04o})" if open_to else ""),
        why="Files are copied to other nodes, shown and committed.",
        next=f"keep it in a file of mode 0600 that {file} names"
        if file
        else "hand it over apart: in a file of mode 0600, or from the caller's environment",
    )


def check_doors(text: str) -> Iterator[Finding]:
    """Servers that listen on every interface."""
    lines = [*map(without_comment, text.split("\n"))]
    joined = re.sub(r"\\\n", "  ", "\n".join(lines))
    for match in _DASHBOARD.finditer(joined):
        yield Finding(
            line=_line(lines, joined, match.start()),
            name="",
            severity=Severity.WARNING,
            what=f"{match[0]}: Ray's dashboard on every interface",
            why="Whoever reaches it runs programs here: it asks for no password.",
            next="leave it out, which is 127.0.0.1, or name the address between the nodes",
            source="Ray's documentation on security",
        )
    for match in _SERVED.finditer(joined):
        if "--api-key" not in joined and "VLLM_API_KEY" not in joined:
            yield Finding(
                line=_line(lines, joined, match.start()),
                name="",
                severity=Severity.NOTE,
                what="vllm serve on every interface, and without a key",
                why="Whoever reaches the port may use the model.",
                next="name an address with --host, or set VLLM_API_KEY",
            )


def _line(lines: Sequence[str], joined: str, position: int) -> int:
    """A continued line was joined with two blanks, so that positions stay."""
    return "\n".join(lines).count("\n", 0, position) + 1 if joined else 1


def check_reading(text: str, where: str, kind: str) -> Iterator[Finding]:
    """What sh, systemd and docker read differently; ``kind`` is the format, if that is known."""
    if kind:
        return
    if "\r\n" in text:
        yield _differently(1, "", "lines end with CR LF", "sh and systemd: CR is in the values")
    if not is_env_file(text, where):
        return
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        match = _ASSIGNED.fullmatch(line)
        if match:
            yield from _line_differs(number, line, match)


def _line_differs(number: int, line: str, match: re.Match[str]) -> Iterator[Finding]:
    name, value = match["name"], without_comment(line).partition("=")[2].strip()
    if match["export"]:
        yield _differently(number, name, f"export {name}", "systemd and docker take no export")
    if without_comment(line) != line and not line.lstrip().startswith(("#", ";")):
        yield _differently(
            number,
            name,
            f"{name} and a comment in one line",
            "for systemd and docker, # and what follows are part of the value",
        )
    if value[:1] in {"'", '"'}:
        yield _differently(
            number, name, f"{name} in quotes", "docker run --env-file keeps the quotes", note=True
        )
    elif re.search(r"\s", value):
        yield _differently(
            number, name, f"{name} with blanks", "sh runs what follows the blank as a command"
        )
    if "$" in value and not value.startswith("'"):
        yield _differently(
            number, name, f"$ in {name}", "sh and docker compose expand it, the others do not"
        )


def _differently(number: int, name: str, what: str, why: str, *, note: bool = False) -> Finding:
    return Finding(
        line=number,
        name=name,
        severity=Severity.NOTE if note else Severity.WARNING,
        what=f"{what}: not every tool reads it alike",
        why=f"{why[:1].upper()}{why[1:]}.",
        next="write NAME=value alone, as `patchkit env --format env` does",
        source="docs/env-files.md",
    )
