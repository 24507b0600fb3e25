"""Check for servers that everybody in the network can reach."""

from __future__ import annotations

import re
from collections.abc import Iterator

from patchkit.finding import Finding, Level
from patchkit.runtime.files.content import CommandLine, FileContent
from patchkit.runtime.rules.sensitive_names import secret_flag

_EVERYWHERE = ("0.0.0.0", "::", "[::]")  # noqa: S104 - what is looked for
# ports: of compose and -p of docker, published at one address of the host
_AT_ADDRESS = re.compile(
    r"(?<![\d.])(?!0\.0\.0\.0)(?:(?:\d{1,3}\.){3}\d{1,3}|localhost|\[::1\]|\$\{?\w+\}?)"
    r":[\w${}:-]{1,60}:\d"
)
_KEY = "VLLM_API_KEY"


def check_servers(text: str, content: FileContent) -> Iterator[Finding]:
    """Return servers that listen on every interface."""
    # Inside of a container it has to be every interface; what counts is what it publishes.
    published = _AT_ADDRESS.search(text) is not None
    for command in content.commands:
        board = command.flag("--dashboard-host")
        if board and board.value in _EVERYWHERE:
            yield Finding(
                line=board.line,
                level=Level.WARNING,
                what=f"--dashboard-host {board.value}: Ray's dashboard on every interface",
                why="Whoever reaches it runs programs here: it asks for no password.",
                hint="leave it out, which is 127.0.0.1, or name the address between the nodes",
                source="Ray's documentation on security",
            )
        if command.program == "vllm serve" and not _has_key(command, content):
            host = command.flag("--host")
            if host and host.value in _EVERYWHERE and not published:
                yield Finding(
                    line=host.line,
                    level=Level.NOTE,
                    what="vllm serve on every interface, and without a key",
                    why="Whoever reaches the port may use the model.",
                    hint=f"name an address with --host, or set {_KEY}",
                )


def _has_key(command: CommandLine, content: FileContent) -> bool:
    """Return whether clients need a key, as far as the file tells."""
    named = {each.name for each in (*content.passed, *content.own, *content.defaults)}
    given = any(secret_flag(flag.name) == "--api-key" for flag in command.flags)
    return given or _KEY in {*named, *content.environment(command)}
