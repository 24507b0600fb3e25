"""Check what others get to see or to reach: secrets in files, keys that are none, open servers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from patchkit.finding import Finding, Level
from patchkit.runtime.check.content import RUNNING, Assignment
from patchkit.runtime.check.messages import make_finding
from patchkit.runtime.check.situation import CheckedText
from patchkit.runtime.check.values import is_template
from patchkit.runtime.rules.sensitive_names import is_secret, secret_file, secret_flag
from patchkit.runtime.rules.variable_values import is_placeholder

_OTHERS = 0o077  # rights of the group and of others
# What programs ask for and nobody checks: a client of one's own server has to send some key.
_DUMMY = re.compile(
    r"(sk-)?(empty|none|null|nil|dummy|fake|test|local|unused|any|anything|n/?a|true|false|\W*|\d+"
    r"|no[-_]?(api[-_]?)?key.*|not[-_]?(needed|required|used|set).*|(token-)?abc123)",
    re.IGNORECASE,
)
_PATH_OR_NAME = re.compile(r"/.*|[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
_OPEN_KEY = re.compile(r"(hf_|sk-)?[xX*.…]{2,}|.{0,99}(?i:your|example|placeholder).{0,99}")
# Keys by the forms that Hugging Face, OpenAI, GitHub, NVIDIA, AWS and Google give theirs.
_ISSUED = re.compile(
    r"hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{32,}|gh[pousr]_[A-Za-z0-9]{36,}|nvapi-[\w-]{40,}"
    r"|AKIA[A-Z0-9]{16}|AIza[\w-]{35}"
)
_DEFAULT = re.compile(r"\$\{(?P<name>[A-Z][A-Z0-9_]{2,60}):?[-=](?P<value>[^${}\n]{1,200})\}")
_EVERYWHERE = ("0.0.0.0", "::", "[::]")  # noqa: S104 - what is looked for
# ports: of compose and -p of docker, published at one address of the host
_AT_ADDRESS = re.compile(
    r"(?<![\d.])(?!0\.0\.0\.0)(?:(?:\d{1,3}\.){3}\d{1,3}|localhost|\[::1\]|\$\{?\w+\}?)"
    r":[\w${}:-]{1,60}:\d"
)
_KEY = "VLLM_API_KEY"


def check_secrets(checked: CheckedText) -> Iterator[Finding]:
    """Yield secrets in a file, and placeholders for keys."""
    content = checked.content
    for assignment in (*content.assignments, *content.own):
        if is_secret(assignment.name) and assignment.is_known:
            if not _is_open_key(assignment.value):
                yield from _check_secret(assignment, checked)
            elif not is_template(checked.where) and not assignment.own:
                yield make_finding("placeholder-key", assignment)
    yield from _check_defaults(checked.text)
    for command in content.commands:
        for flag in command.flags:
            if secret_flag(flag.name):
                if _is_open_key(flag.value):
                    yield make_finding("placeholder-key", flag)
                elif _is_real(flag.value):
                    variable = {"--hf-token": "HF_TOKEN"}.get(flag.name, _KEY)
                    yield make_finding("secret-on-command-line", flag, variable=variable)


def _check_secret(assignment: Assignment, checked: CheckedText) -> Iterator[Finding]:
    mode = checked.mode
    readable = mode is not None and bool(mode & _OTHERS)
    # A script has many names of its own, so only what looks like an issued key counts.
    issued = _ISSUED.fullmatch(assignment.value) is not None
    if checked.content.kind != RUNNING and (
        issued or (not assignment.own and _is_real(assignment.value))
    ):
        file = secret_file(assignment.name)
        apart = "hand it over apart: in a file of mode 0600, or from the caller's environment"
        yield make_finding(
            "secret-in-file",
            assignment,
            Level.ERROR if readable and issued else None,
            readable=f", which others may read ({mode:04o})" if readable else "",
            hint=f"keep it in a file of mode 0600 that {file} names" if file else apart,
        )


def _check_defaults(text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.split("\n") if "${" in text else (), 1):
        for match in _DEFAULT.finditer(line):
            name, value = match["name"], match["value"].strip("\"'")
            # With a known key a server is open to everybody, whatever the key looks like.
            own = name == _KEY and not _DUMMY.fullmatch(value)
            if is_secret(name) and (own or (_is_real(value) and not _is_open_key(value))):
                yield make_finding("secret-default", Assignment(number, name, ""))


def _is_open_key(value: str) -> bool:
    return is_placeholder("", value) or bool(_OPEN_KEY.fullmatch(value))


def _is_real(value: str) -> bool:
    """Return whether a value may be a secret: no path, no dummy, no name of another variable."""
    return not (not value or _DUMMY.fullmatch(value) or _PATH_OR_NAME.fullmatch(value))


def check_servers(checked: CheckedText) -> Iterator[Finding]:
    """Yield servers that listen on every interface."""
    # Inside of a container it has to be every interface; what counts is what it publishes.
    content = checked.content
    published = _AT_ADDRESS.search(checked.text) is not None
    known = {*content.passed, *(assignment.name for assignment in content.own)}
    for command in content.commands:
        board, host = command.find_flag("--dashboard-host"), command.find_flag("--host")
        if board and board.value in _EVERYWHERE:
            yield make_finding("open-dashboard", board)
        given = any(secret_flag(flag.name) == "--api-key" for flag in command.flags)
        has_key = given or _KEY in known or content.find_variable(_KEY, command)
        is_open = host and host.value in _EVERYWHERE and command.program == "vllm serve"
        if host and is_open and not has_key and not published:
            yield make_finding("open-server", host)
