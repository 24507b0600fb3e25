"""Check servers: flags and their values, secrets, keys that are none, who reaches them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from patchkit.finding import Finding, Level
from patchkit.runtime.check.commands import MOST_WORDS, split_statements
from patchkit.runtime.check.content import (
    RUNNING,
    Assignment,
    CheckedText,
    CommandLine,
    FileContent,
    GivenFlag,
    Word,
    build_finding,
    is_literal,
    shorten,
)
from patchkit.runtime.rules.flags import (
    FLAGS,
    Limit,
    flags,
    has_flag,
    load_choices,
    load_flag_rules,
)
from patchkit.runtime.rules.releases import read_env_data, read_table
from patchkit.runtime.rules.rule import holding
from patchkit.runtime.rules.secret_texts import (
    is_readable,
    is_secret,
    matches_one,
    secret_flag,
)
from patchkit.runtime.rules.spelling import Slips, nearest_hint
from patchkit.runtime.rules.variable_values import is_placeholder

_TEXTS = read_env_data("secrets")["texts"]
_KEPT = read_env_data("said")["kept"]
_KEEPS_FLAGS = re.compile("|".join(_KEPT["flags"]))
_NUMBER = re.compile(r"\d{0,9}\.?\d{1,9}")
_SHOWN = 12  # values in a hint
_OTHERS = 0o077  # rights of the group and of others
_DEFAULT = re.compile(
    r"\$\{(?P<name>[A-Z][A-Z0-9_]{2,60}):?[-=](?P<value>[^${}\n]{1,200})\}"
)
_EVERYWHERE = ("0.0.0.0", "::", "[::]")  # noqa: S104 - what is looked for
# ports: of compose and -p of docker, published at one address of the host
_AT_ADDRESS = re.compile(
    r"(?<![\d.])(?!0\.0\.0\.0)(?:(?:\d{1,3}\.){3}\d{1,3}|localhost|\[::1\]|\$\{?\w+\}?)"
    r":[\w${}:-]{1,60}:\d"
)
_UNRECOGNIZED = 'vllm serve ends with "unrecognized arguments".'
_KEY = "VLLM_API_KEY"


def check_server_flags(checked: CheckedText) -> Iterator[Finding]:
    """Yield flags that the release does not take, their values, and what the rules say."""
    rules, version = load_flag_rules(), checked.situation.get("vllm", "")
    slips = Slips(flags(version, checked.home))
    # What reports disagree about is the owner's choice, and no fault of a file.
    valid = holding(rules.leave_out, checked.situation)
    advised = [rule for rule in valid if rule.confidence != "contested"]
    limits = holding(rules.limits, checked.situation)
    for server in (*_started_servers(checked.content), *_kept_words(checked.content)):
        for flag in server.flags:
            if not _is_taken(flag, checked):
                yield from _find_unknown(flag, server, checked, slips)
                continue
            yield from _check_choice(flag, server, checked)
            for rule in advised:
                if rule.flag == flag.name and rule.matches(flag.value):
                    words = {"why": rule.reason, "source": rule.source}
                    yield build_finding("discouraged-flag", flag, None, **words)
            yield from _check_limits(flag, server, limits)


def _started_servers(content: FileContent) -> Iterator[CommandLine]:
    yield from (
        command for command in content.commands if command.program == "vllm serve"
    )


def _kept_words(content: FileContent) -> Iterator[CommandLine]:
    """Yield the words of a server that well-known variables keep for a script.

    Of what runs, the command itself says what came of them.
    """
    variables = () if content.kind == RUNNING else (*content.assignments, *content.own)
    for variable in variables:
        flag = _KEPT["values"].get(variable.name)
        if flag:
            words = [Word(flag, variable.line), Word(variable.value, variable.line)]
        elif _KEEPS_FLAGS.fullmatch(variable.name):
            statements = split_statements(variable.value, variable.line)
            words = [word for statement, _indented in statements for word in statement]
        else:
            continue
        yield CommandLine(
            program="vllm serve",
            words=tuple(words[:MOST_WORDS]),
            line=variable.line,
            block=variable.block,
            kept_in=variable.name,
        )


def _is_taken(flag: GivenFlag, checked: CheckedText) -> bool:
    """Return whether the release takes a flag; a beginning of one flag alone is that flag."""
    # Short flags such as -tp are in no table.
    if not flag.name.startswith("--"):
        return True
    version = checked.situation.get("vllm", "")
    if has_flag(flag.name, version, checked.home):
        return True
    return sum(name.startswith(flag.name) for name in flags(version, checked.home)) == 1


def _find_unknown(
    flag: GivenFlag, server: CommandLine, checked: CheckedText, slips: Slips
) -> Iterator[Finding]:
    """Yield that the release does not take a flag, and what became of it."""
    version = checked.situation.get("vllm", "")
    life = read_table(FLAGS).lifetime(flag.name)
    if flag.kept_in and not life:
        return  # it may be the script's own
    words = {"why": _reason_against(flag)}
    certain = bool(version and (life or checked.runs_upstream(server.block)))
    words["hint"] = (
        "leave it out" if certain else "of a fork? Then keep it, else leave it out"
    )
    if life:
        keeper = f" of {shorten(flag.kept_in)}" if flag.kept_in else ""
        span = f"{life.first} to {life.last} had it"
        words["what"] = f"vLLM {version} has no {flag.written}{keeper}; {span}"
    else:
        words["what"] = f"no known vLLM takes {shorten(flag.written)}"
        close = slips(flag.name)
        if close:
            words["hint"] = f"did you mean {close}?"
    yield build_finding("unknown-flag", flag, Level.ERROR if certain else None, **words)


def _reason_against(flag: GivenFlag) -> str:
    """Return what a rule without a condition says became of a flag, else what vLLM says of it."""
    rows = (
        row
        for row in load_flag_rules().leave_out
        if row.flag == flag.name and not row.when
    )
    return next((row.reason for row in rows), _UNRECOGNIZED)


def _check_limits(
    flag: GivenFlag, server: CommandLine, limits: Sequence[Limit]
) -> Iterator[Finding]:
    """Yield a value above what the rules say is the most."""
    value = float(flag.value) if _NUMBER.fullmatch(flag.value) else 0.0
    for limit in limits:
        if (
            flag.name != limit.flag
            or value <= limit.most
            or server.find_flag(limit.unless)
        ):
            continue
        level = Level.WARNING if value >= limit.harmful else Level.NOTE
        words = {"why": limit.reason, "hint": limit.instead, "source": limit.source}
        finding = build_finding(
            "over-limit", flag, level, **words, most=f"{limit.most:g}"
        )
        yield replace(finding, id=f"{limit.flag.lstrip('-')}-high")


def _check_choice(
    flag: GivenFlag, server: CommandLine, checked: CheckedText
) -> Iterator[Finding]:
    """Yield a value that the release does not take; a plugin brings parsers of its own."""
    choices = load_choices().get(flag.name)
    plugin = any(other.name.endswith("-parser-plugin") for other in server.flags)
    if choices is None or not flag.value or (plugin and flag.name.endswith("-parser")):
        return
    version = checked.situation.get("vllm", "")
    takes = choices.known(version)
    if not takes.has(flag.value):
        names = takes.words
        words = {
            "reader": f"vLLM {version}" if version else "any known vLLM",
            "value": shorten(flag.value),
            "hint": nearest_hint(
                flag.value, names, f"it takes {', '.join(names[:_SHOWN])}"
            ),
            "file": choices.files[0],
        }
        certain = version and checked.runs_upstream(server.block)
        yield build_finding(
            "unknown-flag-value", flag, Level.ERROR if certain else None, **words
        )


def check_secrets(checked: CheckedText) -> Iterator[Finding]:
    """Yield secrets in a file, and placeholders for keys."""
    content, mode = checked.content, checked.mode or 0
    for assignment in (*content.assignments, *content.own):
        if not is_secret(assignment.name) or not is_literal(assignment.value):
            continue
        # A script has many names of its own, so only the form of an issued key counts there.
        issued = matches_one(_TEXTS["tokens"], assignment.value)
        if _is_open_key(assignment.value):
            if not assignment.own:
                yield build_finding("placeholder-key", assignment)
        elif checked.content.kind != RUNNING and (
            issued or (not assignment.own and _may_be_secret(assignment.value))
        ):
            file = read_env_data("secrets")["files"].get(assignment.name, "")
            apart = "hand it over apart: in a file of mode 0600, or from the caller's environment"
            yield build_finding(
                "secret-in-file",
                assignment,
                Level.ERROR if mode & _OTHERS and issued else None,
                readable=f", which others may read ({mode:04o})"
                if mode & _OTHERS
                else "",
                hint=f"keep it in a file of mode 0600 that {file} names"
                if file
                else apart,
            )
    for flag in (flag for command in content.commands for flag in command.flags):
        if secret_flag(flag.name) and _is_open_key(flag.value):
            yield build_finding("placeholder-key", flag)
        elif secret_flag(flag.name) and _may_be_secret(flag.value):
            variable = "HF_TOKEN" if flag.name == "--hf-token" else _KEY
            yield build_finding("secret-on-command-line", flag, variable=variable)


def check_defaults(checked: CheckedText) -> Iterator[Finding]:
    """Yield secrets that are defaults: ``${NAME:-value}``."""
    lines = checked.text.split("\n") if "${" in checked.text else ()
    for number, line in enumerate(lines, 1):
        for match in _DEFAULT.finditer(line):
            name, value = match["name"], match["value"].strip("\"'")
            # With a known key a server is open to everybody, whatever the key looks like.
            own = name == _KEY and not matches_one(_TEXTS["dummies"], value)
            if is_secret(name) and (
                own or (_may_be_secret(value) and not _is_open_key(value))
            ):
                yield build_finding("secret-default", Assignment(number, name, ""))


def _is_open_key(value: str) -> bool:
    return is_placeholder("", value) or matches_one(_TEXTS["open"], value)


def _may_be_secret(value: str) -> bool:
    """Return whether a value is no path, no dummy and no name of another variable."""
    return not (
        matches_one(_TEXTS["dummies"], value) or is_readable(value, quoted=True)
    )


def check_servers(checked: CheckedText) -> Iterator[Finding]:
    """Yield servers that listen on every interface."""
    # Inside of a container it has to be every interface; what counts is what it publishes.
    content = checked.content
    published = _AT_ADDRESS.search(checked.text) is not None
    own = {*content.passed, *(assignment.name for assignment in content.own)}
    blocks = {found.block for found in content.assignments if found.name == _KEY}
    for command in content.commands:
        board, host = command.find_flag("--dashboard-host"), command.find_flag("--host")
        if board and board.value in _EVERYWHERE:
            yield build_finding("open-dashboard", board)
        given = any(secret_flag(flag.name) == "--api-key" for flag in command.flags)
        has_key = given or _KEY in own or not blocks.isdisjoint((0, command.block))
        is_open = host and host.value in _EVERYWHERE and command.program == "vllm serve"
        if host and is_open and not has_key and not published:
            yield build_finding("open-server", host)
