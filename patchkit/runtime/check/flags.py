"""Check flags of `vllm serve`: names and values that the release takes, limits, the rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from patchkit.finding import Finding, Level
from patchkit.runtime.check.content import (
    Assignment,
    CommandLine,
    FileContent,
    GivenFlag,
    shorten,
)
from patchkit.runtime.check.messages import make_finding
from patchkit.runtime.check.versions import runs_upstream
from patchkit.runtime.rules.condition import Situation
from patchkit.runtime.rules.flag_rules import Limit, load_flag_rules
from patchkit.runtime.rules.flag_values import load_choices
from patchkit.runtime.rules.flags import flag_lifetime, flags, has_flag
from patchkit.runtime.rules.rule import holding
from patchkit.runtime.rules.spelling import Slips
from patchkit.runtime.rules.variables import nearest

_NUMBER = re.compile(r"\d{0,9}\.?\d{1,9}")
_SHOWN = 12  # values in a hint


@dataclass(frozen=True, kw_only=True)
class FlagCheck:
    """The check of one file's servers; ``home`` is the folder of its vLLM, if it is installed."""

    content: FileContent
    situation: Situation
    home: Path | None

    @cached_property
    def _version(self) -> str:
        return self.situation.get("vllm", "")

    @cached_property
    def _slips(self) -> Slips:
        return Slips(flags(self._version, self.home))

    def find_problems(self) -> Iterator[Finding]:
        """Yield flags that the release does not take, their values, and what the rules say."""
        # What reports disagree about is the owner's choice, and no fault of a file.
        rules = holding(load_flag_rules().leave_out, self.situation)
        advised = [rule for rule in rules if rule.confidence != "contested"]
        for command in self.content.commands:
            for flag in command.flags if command.program == "vllm serve" else ():
                if not self._is_taken(flag.name):
                    yield self._unknown_flag(flag, command)
                    continue
                yield from self._check_choice(flag, command)
                for rule in advised:
                    if rule.flag == flag.name and rule.matches(flag.value):
                        told = {"why": rule.reason, "source": rule.source}
                        yield make_finding("discouraged-flag", flag, None, **told)
        for limit in holding(load_flag_rules().limits, self.situation):
            yield from self._check_limit(limit)

    def _is_taken(self, name: str) -> bool:
        """Return whether the parser takes a flag: written out, or as the beginning of one alone."""
        if has_flag(name, self._version, self.home) or not name.startswith("--"):
            return True  # short flags such as -tp are in no table
        # argparse takes any beginning that only one flag has.
        return sum(known.startswith(name) for known in flags(self._version, self.home)) == 1

    def _unknown_flag(self, flag: GivenFlag, command: CommandLine) -> Finding:
        """Return a flag that the release does not take; an error where upstream's vLLM runs.

        A fork or a plugin may take more flags, but rarely one again that upstream has dropped.
        """
        life = flag_lifetime(flag.name)
        close = "" if life else self._slips(flag.name)
        what = f"no known vLLM takes {shorten(flag.written)}"
        if life:
            ended = f"{life.first} to {life.last} do"
            what = f"vLLM {self._version} does not take {flag.written}: {ended}"
        # Of a flag that no release takes, a rule without a condition may say what became of it.
        rules = load_flag_rules().leave_out
        reasons = (rule.reason for rule in rules if rule.flag == flag.name and not rule.when)
        upstream = runs_upstream(self.content, command.block)
        certain = bool(self._version) and bool(upstream or life)
        hint = "leave it out" if certain else "of a fork? Then keep it, else leave it out"
        hint = f"did you mean {close}?" if close else hint
        why = next(reasons, 'vllm serve ends with "unrecognized arguments".')
        level = Level.ERROR if certain else None
        return make_finding("unknown-flag", flag, level, what=what, why=why, hint=hint)

    def _check_choice(self, flag: GivenFlag, command: CommandLine) -> Iterator[Finding]:
        choices = next((row for row in load_choices() if row.flag == flag.name), None)
        # A plugin brings parsers of its own.
        plugin = any(given.name.endswith("-parser-plugin") for given in command.flags)
        plugin = plugin and flag.name.endswith("-parser")
        if choices is None or plugin or not flag.value:
            return
        names = tuple(value.partition(" ")[0] for value in choices.values)
        if self._version:
            names = choices.read(self.home) if self.home else choices.known(self._version)
        if not choices.has(flag.value, names):
            close = nearest(flag.value, names)
            upstream = runs_upstream(self.content, command.block)
            yield make_finding(
                "unknown-flag-value",
                flag,
                Level.ERROR if self._version and upstream else None,
                reader=f"vLLM {self._version}" if self._version else "any known vLLM",
                value=shorten(flag.value),
                hint=f"did you mean {close}?" if close else f"it takes {', '.join(names[:_SHOWN])}",
                file=choices.files[0],
            )

    def _check_limit(self, limit: Limit) -> Iterator[Finding]:
        """Yield flags above a limit, and variables that scripts hand on as the flag.

        Each value is reported once: at the flag, else where a variable has it.
        """
        given: list[GivenFlag | Assignment] = [
            flag
            for command in self.content.commands
            if command.program == "vllm serve" and not command.find_flag(limit.unless)
            for flag in command.flags
            if flag.name == limit.flag
        ]
        # A share has a point; a whole number under such a name is one of GPUs or of GiB.
        given += [
            assignment
            for assignment in (*self.content.assignments, *self.content.own)
            if "." in assignment.value and re.fullmatch(limit.variables, assignment.name)
        ]
        reported: set[float] = set()
        for place in given:
            value = float(place.value) if _NUMBER.fullmatch(place.value) else 0.0
            if limit.most < value <= limit.highest and value not in reported:
                reported.add(value)
                level = Level.WARNING if value >= limit.harmful else Level.NOTE
                told = {"why": limit.reason, "hint": limit.instead, "source": limit.source}
                finding = make_finding("over-limit", place, level, **told, most=f"{limit.most:g}")
                yield replace(finding, id=f"{limit.flag.lstrip('-')}-high")
