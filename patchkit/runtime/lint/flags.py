"""Check flags of `vllm serve` in scripts by what the release takes and by the rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from patchkit.finding import Finding, Level
from patchkit.runtime.lint.scan import Commands, short
from patchkit.runtime.rules.condition import Situation
from patchkit.runtime.rules.flag_rules import load_flag_rules
from patchkit.runtime.rules.flags import flag_lifetime, flags, has_flag
from patchkit.runtime.rules.rule import holding
from patchkit.runtime.rules.variables import Guesses

_SERVE = re.compile(r"vllm serve\b(?P<arguments>[^\n;&|]*)")
# A word that begins with a dash is the next flag, not a value.
_FLAG = re.compile(r"(?<!\S)(?P<flag>--[a-z][\w.-]*)(?:[= ]+(?P<value>[^\s\"'-]\S*))?")


def check_flags(text: str, situation: Situation, home: Path | None) -> Iterator[Finding]:
    """Check a script; ``home`` is the folder of the vLLM in ``situation``, if installed."""
    commands = Commands(text)
    version = situation.get("vllm", "")
    guess = Guesses(flags(version, home))
    advised = holding(load_flag_rules().leave_out, situation)
    for serve in _SERVE.finditer(commands.joined):
        for match in _FLAG.finditer(commands.joined, *serve.span("arguments")):
            line = commands.line(match.start())
            flag, value = match["flag"], match["value"] or ""
            if not has_flag(flag, version, home):
                yield _unknown(line, flag, version, guess)
                continue
            for rule in advised:
                if rule.flag == flag and rule.matches(value):
                    yield Finding(
                        line=line,
                        level=Level.NOTE,
                        what=f"{flag} {value}".strip() + " is better left out",
                        why=rule.reason,
                        hint="`patchkit serve-args` prints what goes with this node",
                        source=rule.source,
                    )


def _unknown(line: int, flag: str, version: str, guess: Guesses) -> Finding:
    life = flag_lifetime(flag)
    close = "" if life else guess(flag)
    what = f"no known vLLM takes {short(flag)}"
    if life:
        what = f"vLLM {version} does not take {flag}: {life.first} to {life.last} do"
    # Of a flag that no release takes, a rule without a condition may say what became of it.
    always = [each for each in load_flag_rules().leave_out if each.flag == flag and not each.when]
    return Finding(
        line=line,
        what=what,
        why=always[0].reason if always else 'vllm serve ends with "unrecognized arguments".',
        hint=f"did you mean {close}?" if close else "leave it out",
        source="vLLM arg_utils.py",
    )
