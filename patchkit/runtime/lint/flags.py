"""Flags of `vllm serve` in scripts: what the release takes, and what the rules say of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from patchkit.finding import Finding, Level
from patchkit.runtime.lint.scan import Commands, short
from patchkit.runtime.rules.flag_rules import load_flag_rules
from patchkit.runtime.rules.flags import flag_lifetime, flags, has_flag
from patchkit.runtime.rules.variable_rules import Situation, holds
from patchkit.runtime.rules.variables import Guesses

_SERVE = re.compile(r"vllm serve\b(?P<arguments>[^\n;&|]*)")
_FLAG = re.compile(r"(?<!\S)(?P<flag>--[a-z][\w.-]*)(?:[= ]+(?P<value>[^\s\"'-]\S*))?")


def check_flags(text: str, situation: Situation, home: Path | None) -> Iterator[Finding]:
    """``home`` is the folder of the installed vLLM, if it is the one in ``situation``."""
    commands = Commands(text)
    guess = Guesses(flags(situation.get("vllm", ""), home))
    for serve in _SERVE.finditer(commands.joined):
        for match in _FLAG.finditer(commands.joined, *serve.span("arguments")):
            line = commands.line(match.start())
            flag, value = match["flag"], match["value"] or ""
            if has_flag(flag, situation.get("vllm", ""), home):
                yield from _advised(line, flag, value, situation)
            else:
                yield _unknown(line, flag, situation.get("vllm", ""), guess)


def _unknown(line: int, flag: str, version: str, guess: Guesses) -> Finding:
    life = flag_lifetime(flag)
    close = "" if life else guess(flag)
    what = f"no known vLLM takes {short(flag)}"
    if life:
        what = f"vLLM {version} does not take {flag}: {life.first} to {life.last} do"
    return Finding(
        line=line,
        about="",
        level=Level.ERROR,
        what=what,
        why=_reason(flag) or 'vllm serve ends with "unrecognized arguments".',
        hint=f"did you mean {close}?" if close else "leave it out",
        source="vLLM arg_utils.py",
    )


def _reason(flag: str) -> str:
    rules = load_flag_rules().leave_out
    return next((each.reason for each in rules if each.flag == flag and not each.when), "")


def _advised(line: int, flag: str, value: str, situation: Situation) -> Iterator[Finding]:
    for rule in load_flag_rules().leave_out:
        if rule.matches(flag, value) and holds(rule.when, situation):
            yield Finding(
                line=line,
                about="",
                level=Level.NOTE,
                what=f"{flag} {value}".strip() + " is better left out",
                why=rule.reason,
                hint="`patchkit serve-args` prints what goes with this node",
                source=rule.source,
            )
