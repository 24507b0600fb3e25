"""Check flags of `vllm serve` by what the release takes and by the rules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from patchkit.finding import Finding, Level
from patchkit.runtime.files.content import FileContent, GivenFlag, short
from patchkit.runtime.lint.upstream import SoftwareOrigin
from patchkit.runtime.rules.condition import Situation
from patchkit.runtime.rules.flag_rules import LeaveOut, load_flag_rules
from patchkit.runtime.rules.flags import flag_lifetime, flags, has_flag
from patchkit.runtime.rules.rule import holding
from patchkit.runtime.rules.spelling import Slips


def check_flags(content: FileContent, situation: Situation, home: Path | None) -> Iterator[Finding]:
    """Check a file's servers; ``home`` is the folder of the vLLM in ``situation``, if installed."""
    version = situation.get("vllm", "")
    slips = Slips(flags(version, home))
    origin = SoftwareOrigin(content)
    # What reports disagree about is the owner's choice, and no fault of a file.
    advised = [
        rule
        for rule in holding(load_flag_rules().leave_out, situation)
        if rule.confidence != "contested"
    ]
    for command in content.commands:
        if command.program != "vllm serve":
            continue
        for flag in command.flags:
            if not _is_taken(flag.name, version, home):
                yield _unknown(flag, version, slips, upstream=origin.is_upstream(command.block))
                continue
            for rule in advised:
                if rule.flag == flag.name.replace("_", "-") and rule.matches(flag.value):
                    yield _advised(flag, rule)


def _is_taken(name: str, version: str, home: Path | None) -> bool:
    """Return whether the parser takes a flag: written out, or as the beginning of one alone."""
    if has_flag(name, version, home) or not name.startswith("--"):
        return True  # short flags such as -tp are in no table
    start = name.replace("_", "-")
    # argparse takes any beginning that only one flag has.
    return sum(each.startswith(start) for each in flags(version, home)) == 1


def _advised(flag: GivenFlag, rule: LeaveOut) -> Finding:
    shown = f"{flag.name} {short(flag.value)}" if flag.literal else flag.name
    return Finding(
        line=flag.line,
        level=Level.NOTE,
        what=f"{shown.strip()} is better left out",
        why=rule.reason,
        hint="`patchkit serve-args` prints what goes with this node",
        source=rule.source,
    )


def _unknown(flag: GivenFlag, version: str, slips: Slips, *, upstream: bool) -> Finding:
    """Return a flag that the release does not take; an error where upstream's vLLM is known to run.

    A fork or a plugin may take more flags, but rarely one again that upstream has dropped.
    """
    life = flag_lifetime(flag.name)
    close = "" if life else slips(flag.name)
    what = f"no known vLLM takes {short(flag.name)}"
    if life:
        what = f"vLLM {version} does not take {flag.name}: {life.first} to {life.last} do"
    # Of a flag that no release takes, a rule without a condition may say what became of it.
    always = [
        rule for rule in load_flag_rules().leave_out if rule.flag == flag.name and not rule.when
    ]
    certain = bool(version) and (upstream or bool(life))
    hint = "leave it out" if life or certain else "of a fork? Then keep it, else leave it out"
    return Finding(
        line=flag.line,
        level=Level.ERROR if certain else Level.WARNING,
        what=what,
        why=always[0].reason if always else 'vllm serve ends with "unrecognized arguments".',
        hint=f"did you mean {close}?" if close else hint,
        source="vLLM arg_utils.py",
    )
