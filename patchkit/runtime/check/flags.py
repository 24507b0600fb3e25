"""Check flags of `vllm serve`: names and values that the release takes, limits, the rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from patchkit.finding import Finding, Level
from patchkit.runtime.check.content import Assignment, CommandLine, GivenFlag, shorten
from patchkit.runtime.check.messages import make_finding
from patchkit.runtime.check.situation import CheckedText
from patchkit.runtime.check.versions import runs_upstream
from patchkit.runtime.rules.flag_rules import Limit, load_flag_rules
from patchkit.runtime.rules.flag_values import load_choices
from patchkit.runtime.rules.flags import flag_lifetime, flags, has_flag
from patchkit.runtime.rules.rule import holding
from patchkit.runtime.rules.spelling import Slips
from patchkit.runtime.rules.variables import nearest

_NUMBER = re.compile(r"\d{0,9}\.?\d{1,9}")
_SHOWN = 12  # values in a hint


def check_flags(checked: CheckedText) -> Iterator[Finding]:
    """Yield flags that the release does not take, their values, and what the rules say."""
    rules, version = load_flag_rules(), checked.situation.get("vllm", "")
    slips = Slips(flags(version, checked.home))
    # What reports disagree about is the owner's choice, and no fault of a file.
    held = holding(rules.leave_out, checked.situation)
    advised = [rule for rule in held if rule.confidence != "contested"]
    servers = [server for server in checked.content.commands if server.program == "vllm serve"]
    for server in servers:
        # A plugin brings parsers of its own.
        plugin = any(flag.name.endswith("-parser-plugin") for flag in server.flags)
        for flag in server.flags:
            if not _is_taken(flag.name, version, checked):
                yield _unknown_flag(flag, server, checked, slips)
                continue
            if not (plugin and flag.name.endswith("-parser")):
                yield from _check_choice(flag, server, checked)
            for rule in advised:
                if rule.flag == flag.name and rule.matches(flag.value):
                    words = {"why": rule.reason, "source": rule.source}
                    yield make_finding("discouraged-flag", flag, None, **words)
    for limit in holding(rules.limits, checked.situation):
        given = [server for server in servers if not server.find_flag(limit.unless)]
        found = [flag for server in given for flag in server.flags if flag.name == limit.flag]
        yield from _check_limit(limit, found, checked)


def _is_taken(name: str, version: str, checked: CheckedText) -> bool:
    """Return whether the parser takes a flag: written out, or as the beginning of one alone."""
    if has_flag(name, version, checked.home) or not name.startswith("--"):
        return True  # short flags such as -tp are in no table
    # argparse takes any beginning that only one flag has.
    return sum(known.startswith(name) for known in flags(version, checked.home)) == 1


def _unknown_flag(
    flag: GivenFlag, server: CommandLine, checked: CheckedText, slips: Slips
) -> Finding:
    """Return a flag that the release does not take; an error where upstream's vLLM runs.

    A fork or a plugin may take more flags, but rarely one again that upstream has dropped.
    """
    version, life = checked.situation.get("vllm", ""), flag_lifetime(flag.name)
    close = "" if life else slips(flag.name)
    what = f"no known vLLM takes {shorten(flag.written)}"
    if life:
        what = f"vLLM {version} does not take {flag.written}: {life.first} to {life.last} do"
    # Of a flag that no release takes, a rule without a condition may say what became of it.
    rules = load_flag_rules().leave_out
    reasons = (rule.reason for rule in rules if rule.flag == flag.name and not rule.when)
    why = next(reasons, 'vllm serve ends with "unrecognized arguments".')
    certain = bool(version and (life or runs_upstream(checked.content, server.block)))
    hint = "leave it out" if certain else "of a fork? Then keep it, else leave it out"
    hint = f"did you mean {close}?" if close else hint
    level = Level.ERROR if certain else None
    return make_finding("unknown-flag", flag, level, what=what, why=why, hint=hint)


def _check_choice(flag: GivenFlag, server: CommandLine, checked: CheckedText) -> Iterator[Finding]:
    choices = next((row for row in load_choices() if row.flag == flag.name), None)
    if choices is None or not flag.value:
        return
    version = checked.situation.get("vllm", "")
    names = tuple(value.partition(" ")[0] for value in choices.values)
    if version:
        names = choices.read(checked.home) if checked.home else choices.known(version)
    if not choices.has(flag.value, names):
        close = nearest(flag.value, names)
        upstream = runs_upstream(checked.content, server.block)
        yield make_finding(
            "unknown-flag-value",
            flag,
            Level.ERROR if version and upstream else None,
            reader=f"vLLM {version}" if version else "any known vLLM",
            value=shorten(flag.value),
            hint=f"did you mean {close}?" if close else f"it takes {', '.join(names[:_SHOWN])}",
            file=choices.files[0],
        )


def _check_limit(limit: Limit, given: list[GivenFlag], checked: CheckedText) -> Iterator[Finding]:
    """Yield flags above a limit, and variables that scripts hand on as the flag.

    Each value is reported once: at the flag, else where a variable has it.
    """
    # A share has a point; a whole number under such a name is one of GPUs or of GiB.
    places: list[GivenFlag | Assignment] = [
        *given,
        *(
            assignment
            for assignment in (*checked.content.assignments, *checked.content.own)
            if "." in assignment.value and re.fullmatch(limit.variables, assignment.name)
        ),
    ]
    reported: set[float] = set()
    for place in places:
        value = float(place.value) if _NUMBER.fullmatch(place.value) else 0.0
        if limit.most < value <= limit.highest and value not in reported:
            reported.add(value)
            level = Level.WARNING if value >= limit.harmful else Level.NOTE
            words = {"why": limit.reason, "hint": limit.instead, "source": limit.source}
            finding = make_finding("over-limit", place, level, **words, most=f"{limit.most:g}")
            yield replace(finding, id=f"{limit.flag.lstrip('-')}-high")
