"""Check for secrets in files, and for keys that are placeholders."""

from __future__ import annotations

import re
from collections.abc import Iterator

from patchkit.finding import Finding
from patchkit.runtime.check.content import (
    RUNNING,
    Assignment,
    CheckedText,
    GivenFlag,
    build_finding,
)
from patchkit.runtime.rules.releases import read_env_data
from patchkit.runtime.rules.secret_texts import (
    is_readable,
    is_secret,
    matches_one,
    secret_flag,
)
from patchkit.runtime.rules.variable_values import is_placeholder

API_KEY = "VLLM_API_KEY"
_TEXTS = read_env_data("secrets")["texts"]
_FOR_OTHERS = 0o077  # bits of a file's mode: rights of the group and of others
_DEFAULT = re.compile(
    r"\$\{(?P<name>[A-Z][A-Z0-9_]{2,60}):?[-=](?P<value>[^${}\n]{1,200})\}"
)
_HAND_OVER = (
    "hand it over apart: in a file of mode 0600, or from the caller's environment"
)


def check_secrets(checked: CheckedText) -> Iterator[Finding]:
    """Yield secrets in variables and flags of a file, and keys that are placeholders."""
    for variable in checked.content.variables:
        if is_secret(variable.name) and variable.is_literal:
            yield from _check_variable(variable, checked)

    for flag in checked.content.flags:
        if secret_flag(flag.name):
            yield from _check_flag(flag)


def _check_variable(variable: Assignment, checked: CheckedText) -> Iterator[Finding]:
    if _is_placeholder_key(variable.value):
        if not variable.is_private:
            yield build_finding("placeholder-key", variable)
        return

    # The name of a script's private variable tells nothing, so only the form of its value counts.
    is_issued = matches_one(_TEXTS["tokens"], variable.value)
    is_likely = not variable.is_private and _may_be_secret(variable.value)

    if checked.content.kind == RUNNING or not (is_issued or is_likely):
        return

    is_readable_for_others = bool(checked.mode & _FOR_OTHERS)
    readable = ""
    if is_readable_for_others:
        readable = f", which others may read ({checked.mode:04o})"

    file_variable = read_env_data("secrets")["files"].get(variable.name)
    hint = _HAND_OVER
    if file_variable:
        hint = f"keep it in a file of mode 0600 that {file_variable} names"

    yield build_finding(
        "secret-in-file",
        variable,
        is_error=is_readable_for_others and is_issued,
        readable=readable,
        hint=hint,
    )


def _check_flag(flag: GivenFlag) -> Iterator[Finding]:
    if _is_placeholder_key(flag.value):
        yield build_finding("placeholder-key", flag)
    elif _may_be_secret(flag.value):
        variable = "HF_TOKEN" if flag.name == "--hf-token" else API_KEY
        yield build_finding("secret-on-command-line", flag, variable=variable)


def check_defaults(checked: CheckedText) -> Iterator[Finding]:
    """Yield secrets that are defaults of variables, as ``value`` in ``${NAME:-value}``."""
    for number, line in enumerate(checked.text.split("\n"), 1):
        for match in _DEFAULT.finditer(line):
            value = match["value"].strip("\"'")
            if is_secret(match["name"]) and _is_open_default(match["name"], value):
                variable = Assignment(number, match["name"], "")
                yield build_finding("secret-default", variable)


def _is_open_default(name: str, value: str) -> bool:
    """Return whether a default is a secret, which everybody who has the file then knows."""
    # With any default API key except a dummy, everybody who has the file can use the server.
    if name == API_KEY and not matches_one(_TEXTS["dummies"], value):
        return True

    return _may_be_secret(value) and not _is_placeholder_key(value)


def _is_placeholder_key(value: str) -> bool:
    return is_placeholder("", value) or matches_one(_TEXTS["open"], value)


def _may_be_secret(value: str) -> bool:
    """Return whether a value may be a secret: it is no dummy, no reference and no path."""
    is_dummy = matches_one(_TEXTS["dummies"], value)

    return not is_dummy and not is_readable(value, quoted=True)
