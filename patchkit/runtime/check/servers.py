"""Check servers: their flags, the addresses at which they listen, and the secrets in files."""

import re
from collections.abc import Iterator, Sequence

from patchkit.finding import Findings, Level
from patchkit.runtime.check.content import (
    RUNNING,
    SERVE,
    Assignment,
    CheckedText,
    CommandLine,
    FileContent,
    GivenFlag,
    build_finding,
    shorten,
)
from patchkit.runtime.check.shell_words import split_words
from patchkit.runtime.rules.presets import (
    FLAGS,
    LeaveOut,
    flags,
    has_flag,
    load_choices,
    load_flag_rules,
)
from patchkit.runtime.rules.releases import read_env_data, read_table
from patchkit.runtime.rules.rule import select_entries
from patchkit.runtime.rules.secret_texts import (
    is_readable,
    is_secret,
    matches_one,
    secret_flag,
)
from patchkit.runtime.rules.spelling import Slips, nearest_hint
from patchkit.runtime.rules.variable_values import is_placeholder

_KEPT = read_env_data("said")["kept"]
_KEEPS_FLAGS = "|".join(_KEPT["flags"])
_NUMBER = r"\d{0,9}\.?\d{1,9}"
_SHOWN = 12  # values in a hint
_EVERYWHERE = ("0.0.0.0", "::", "[::]")  # noqa: S104 - addresses that findings are about
# A port that compose (ports:) or docker (-p) publishes at one address of the host only.
_AT_ADDRESS = (
    r"(?<![\d.])(?!0\.0\.0\.0)(?:(?:\d{1,3}\.){3}\d{1,3}|localhost|\[::1\]|\$\{?\w+\}?)"
    r":[\w${}:-]{1,60}:\d"
)
_MEMORY_SHARE = "gpu-memory-utilization-high"
_UNRECOGNIZED = 'vllm serve ends with "unrecognized arguments".'

API_KEY = "VLLM_API_KEY"
_TEXTS = read_env_data("secrets")["texts"]
_FOR_OTHERS = 0o077  # bits of a file's mode: rights of the group and of others
_DEFAULT = r"\$\{(?P<name>[A-Z][A-Z0-9_]{2,60}):?[-=](?P<value>[^${}\n]{1,200})\}"
_HAND_OVER = (
    "hand it over apart: in a file of mode 0600, or from the caller's environment"
)


def check_server_flags(checked: CheckedText) -> Findings:
    """Yield flags and values that the release of vLLM refuses, or that rules discourage."""
    slips = Slips(flags(checked.vllm, checked.home))
    discouraged = select_entries(load_flag_rules().leave_out, checked.situation)

    for server in _find_servers(checked.content):
        for flag in server.flags:
            if not _is_taken(flag, checked):
                yield from _find_unknown(flag, server, checked, slips)
                continue

            yield from _check_choice(flag, server, checked)
            yield from _check_discouraged(flag, discouraged)
            yield from _check_memory_share(flag, server, checked)


def _find_servers(content: FileContent) -> Iterator[CommandLine]:
    """Yield the servers that commands start, and one for each variable that keeps flags for one.

    Such a variable has a well-known name, or is a word of a command that starts a server. A running
    process has no such variables: its command has all flags.
    """
    started = [command for command in content.commands if command.program == SERVE]
    yield from started
    if content.kind == RUNNING:
        return

    used = {word.text.strip("${}") for command in started for word in command.words}

    for variable in content.variables:
        flag = _KEPT["values"].get(variable.name, "")
        is_known = flag or re.fullmatch(_KEEPS_FLAGS, variable.name)
        if not is_known and variable.name not in used:
            continue

        words = split_words(f"{flag} {variable.value}", variable.line)
        yield CommandLine(
            program=SERVE,
            words=tuple(words),
            line=variable.line,
            block=variable.block,
            kept_in=variable.name,
        )


def _is_taken(flag: GivenFlag, checked: CheckedText) -> bool:
    """Return whether the release takes a flag, also as the beginning of only one of its flags."""
    # Short flags such as -tp are in no table.
    if not flag.name.startswith("--"):
        return True
    if has_flag(flag.name, checked.vllm, checked.home):
        return True

    known_flags = flags(checked.vllm, checked.home)
    return sum(name.startswith(flag.name) for name in known_flags) == 1


def _find_unknown(
    flag: GivenFlag, server: CommandLine, checked: CheckedText, slips: Slips
) -> Findings:
    """Yield a finding about a flag that the release does not take, with what to do instead.

    Yield nothing for a flag in a variable that no release of vLLM has.
    """
    life = read_table(FLAGS).lifetime(flag.name)
    if flag.kept_in and not life:
        return  # the flag may belong to another program of the script

    is_refused = life is not None or checked.runs_upstream(server.block)
    is_certain = checked.vllm and is_refused
    hint = "of a fork? Then keep it, else leave it out"
    if is_certain:
        hint = "leave it out"

    if life:
        keeper = f" of {shorten(flag.kept_in)}" if flag.kept_in else ""
        what = (
            f"vLLM {checked.vllm} has no {flag.written}{keeper}; "
            f"{life.first} to {life.last} had it"
        )
    else:
        what = f"no known vLLM takes {shorten(flag.written)}"
        meant = slips.find_meant(flag.name)
        if meant:
            hint = f"did you mean {meant}?"

    yield build_finding(
        "unknown-flag",
        flag,
        is_error=bool(is_certain),
        what=what,
        why=_reason_against(flag),
        hint=hint,
    )


def _reason_against(flag: GivenFlag) -> str:
    """Return the reason of the rule that always discourages a flag, else vLLM's error for it."""
    for row in load_flag_rules().leave_out:
        if row.flag == flag.name and not row.when:
            return row.reason

    return _UNRECOGNIZED


def _check_discouraged(flag: GivenFlag, rules: Sequence[LeaveOut]) -> Findings:
    """Yield a finding for each rule that discourages a flag with its value."""
    for rule in rules:
        # Reports about a contested rule disagree, so the owner of the file decides.
        is_contested = rule.confidence == "contested"
        if rule.is_against(flag.name, flag.value) and not is_contested:
            yield build_finding(
                "discouraged-flag",
                flag,
                why=rule.reason,
                source=rule.source,
            )


def _check_memory_share(
    flag: GivenFlag, server: CommandLine, checked: CheckedText
) -> Findings:
    """Yield a finding about a share of the memory that leaves too little to the CPU."""
    row = read_env_data("findings")[_MEMORY_SHARE]
    is_on_device = checked.situation["target"] == row["target"]
    if flag.name != row["flag"] or server.find_flag(row["unless"]):
        return

    value = float(flag.value) if re.fullmatch(_NUMBER, flag.value) else 0.0
    if is_on_device and value > row["most"]:
        level = Level.WARNING if value >= row["harmful"] else None
        yield build_finding(_MEMORY_SHARE, flag, level=level)


def _check_choice(
    flag: GivenFlag, server: CommandLine, checked: CheckedText
) -> Findings:
    """Yield a finding if the release does not take a flag's value.

    If the server loads a parser plugin, names of parsers are not checked.
    """
    choices = load_choices().get(flag.name)
    if choices is None or not flag.value:
        return

    allowed = choices.allowed_by(checked.vllm)
    if allowed.allows(flag.value):
        return

    has_plugin = any(row.name.endswith("-parser-plugin") for row in server.flags)
    if flag.name.endswith("-parser") and has_plugin:
        return

    listed = f"it takes {', '.join(allowed.words[:_SHOWN])}"
    is_certain = checked.vllm and checked.runs_upstream(server.block)
    yield build_finding(
        "unknown-flag-value",
        flag,
        is_error=bool(is_certain),
        reader=f"vLLM {checked.vllm}" if checked.vllm else "any known vLLM",
        value=shorten(flag.value),
        hint=nearest_hint(flag.value, allowed.words, listed),
        file=choices.files[0],
    )


def check_listeners(checked: CheckedText) -> Findings:
    """Yield servers without an API key, and dashboards, that listen on every interface."""
    # In a container, a server has to listen on every interface, so its published address counts. If
    # the file publishes a port at one address only, nothing is reported about servers.
    is_published_at_address = re.search(_AT_ADDRESS, checked.text) is not None
    for command in checked.content.commands:
        dashboard = command.find_flag("--dashboard-host")
        if dashboard and dashboard.value in _EVERYWHERE:
            yield build_finding("open-dashboard", dashboard)

        host = command.find_flag("--host")
        if command.program != SERVE or host is None or is_published_at_address:
            continue
        if host.value in _EVERYWHERE and not _has_key(command, checked.content):
            yield build_finding("open-server", host)


def _has_key(command: CommandLine, content: FileContent) -> bool:
    """Return whether a server gets an API key by a flag, a variable or the caller's environment."""
    names = {*content.passed, *(secret_flag(flag.name) for flag in command.flags)}

    for variable in content.variables:
        if variable.is_private or variable.block in (0, command.block):
            names.add(variable.name)

    return not names.isdisjoint((API_KEY, "--api-key"))


def check_secrets(checked: CheckedText) -> Findings:
    """Yield secrets in variables and flags of a file, and keys that are placeholders."""
    for variable in checked.content.variables:
        if is_secret(variable.name) and variable.is_literal:
            yield from _check_variable(variable, checked)

    for flag in checked.content.flags:
        if secret_flag(flag.name):
            yield from _check_flag(flag)


def _check_variable(variable: Assignment, checked: CheckedText) -> Findings:
    is_exported = checked.content.exports(variable)
    if _is_placeholder_key(variable.value):
        if is_exported:
            yield build_finding("placeholder-key", variable)
        return

    # The name of a script's private variable tells nothing, so only the form of its value counts.
    is_issued = matches_one(_TEXTS["tokens"], variable.value)
    is_likely = is_exported and _may_be_secret(variable.value)

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


def _check_flag(flag: GivenFlag) -> Findings:
    if _is_placeholder_key(flag.value):
        yield build_finding("placeholder-key", flag)
    elif _may_be_secret(flag.value):
        variable = "HF_TOKEN" if flag.name == "--hf-token" else API_KEY
        yield build_finding("secret-on-command-line", flag, variable=variable)


def check_defaults(checked: CheckedText) -> Findings:
    """Yield secrets that are defaults of variables, as ``value`` in ``${NAME:-value}``."""
    for number, line in enumerate(checked.text.split("\n"), 1):
        for match in re.finditer(_DEFAULT, line):
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
