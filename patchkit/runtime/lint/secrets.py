"""Check for secrets in a file: written out, or as the default of a variable."""

from __future__ import annotations

import re
from collections.abc import Iterator

from patchkit.finding import Finding, Level
from patchkit.runtime.files.content import Assignment, FileContent, is_open
from patchkit.runtime.lint.placeholders import is_placeholder
from patchkit.runtime.rules.sensitive_names import is_secret, secret_file, secret_flag

_OTHERS = 0o077  # rights of the group and of others
# What programs ask for and nobody checks: a client of one's own server has to send some key.
_DUMMY = re.compile(
    r"(sk-)?(empty|none|null|nil|dummy|fake|test|local|unused|any|anything|n/?a|true|false|x+|\W*|\d+"
    r"|no[-_]?(api[-_]?)?key.*|not[-_]?(needed|required|used|set).*|(token-)?abc123)",
    re.IGNORECASE,
)
_ELSEWHERE = re.compile(r"[/$].*|[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
# Keys by the forms that Hugging Face, OpenAI, GitHub, NVIDIA, AWS and Google give theirs.
_ISSUED = re.compile(
    r"hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{32,}|gh[pousr]_[A-Za-z0-9]{36,}|nvapi-[\w-]{40,}"
    r"|AKIA[A-Z0-9]{16}|AIza[\w-]{35}"
)


def check_secrets(content: FileContent, mode: int | None) -> Iterator[Finding]:
    """Return secrets in a file; ``mode`` are the file's rights, None for standard input."""
    for each in content.assignments:
        if is_secret(each.name) and each.literal and not each.default and _is_real(each.value):
            yield _written(each, mode)
    for each in content.own:
        # A script has many names of its own, so only what looks like an issued key counts.
        if each.literal and not each.default and _ISSUED.fullmatch(each.value):
            yield _written(each, mode)
    for each in content.defaults:
        # With a known key a server is open to everybody, whatever the key looks like.
        own = each.name == "VLLM_API_KEY" and not _DUMMY.fullmatch(each.value)
        if is_secret(each.name) and each.literal and (own or _is_real(each.value)):
            yield each.warning(
                f"{each.name} has a default in the file",
                why="Where nobody sets it, everybody who has the file knows it.",
                hint=f"write ${{{each.name}:?}}, which stops a launch without it",
            )
    for command in content.commands:
        for given in command.flags:
            flag = secret_flag(given.name)
            if flag and given.literal and not given.default and _is_real(given.value):
                variable = {"--hf-token": "HF_TOKEN"}.get(flag, "VLLM_API_KEY")
                yield Finding(
                    line=given.line,
                    level=Level.WARNING,
                    what=f"the value of {flag} is in the file",
                    why="Files are copied and committed, and all users of a host see command "
                    "lines.",
                    hint=f"set {variable}, from a file of mode 0600 or the caller's environment",
                )


def _is_real(value: str) -> bool:
    """Return whether a value may be a secret: no placeholder, path, or name of another variable."""
    open_ = is_open(value) or is_placeholder("", value)
    return not (open_ or _DUMMY.fullmatch(value) or _ELSEWHERE.fullmatch(value))


def _written(assigned: Assignment, mode: int | None) -> Finding:
    """Return a secret; an error where it is an issued key that others may read."""
    readable = mode is not None and bool(mode & _OTHERS)
    file = secret_file(assigned.name)
    issued = _ISSUED.fullmatch(assigned.value) is not None
    return Finding(
        line=assigned.line,
        about=assigned.name,
        level=Level.ERROR if readable and issued else Level.WARNING,
        what=f"the value of {assigned.name} is in the file"
        + (f", which others may read ({mode:04o})" if readable else ""),
        why="Files are copied to other nodes, shown and committed.",
        hint=f"keep it in a file of mode 0600 that {file} names"
        if file
        else "hand it over apart: in a file of mode 0600, or from the caller's environment",
    )
