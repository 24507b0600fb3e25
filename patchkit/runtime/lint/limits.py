"""Check numbers that a launch gives against the most that a target stands."""

from __future__ import annotations

import re
from collections.abc import Iterator

from patchkit.finding import Finding, Level
from patchkit.runtime.files.content import FileContent, GivenFlag
from patchkit.runtime.rules.condition import Situation
from patchkit.runtime.rules.flag_rules import Limit, load_flag_rules
from patchkit.runtime.rules.rule import holding

_NUMBER = re.compile(r"\d{0,9}\.?\d{1,9}")


def check_limits(content: FileContent, situation: Situation) -> Iterator[Finding]:
    """Return flags with a value above the limit, and variables that are named after them.

    A script hands a variable on as the flag. Each value is reported once: where a flag has it from,
    else at the flag, else where a variable has it that no flag gets here.
    """
    for limit in holding(load_flag_rules().limits, situation):
        flags, variables = list(_flags(content, limit)), sorted(_variables(content, limit))
        origins = {(flag.value_line, float(flag.value)) for flag in flags}
        handed_on = [each for each in variables if (each[0], each[2]) in origins]
        given = sorted(
            (each.line, f"{each.name} {each.value}", float(each.value)) for each in flags
        )
        seen: set[float] = set()
        for line, shown, value in (*handed_on, *given, *variables):
            if limit.most < value <= limit.highest and value not in seen:
                seen.add(value)
                yield Finding(
                    line=line,
                    level=Level.WARNING if value >= limit.harmful else Level.NOTE,
                    what=f"{shown}: more than {limit.most:g}",
                    why=limit.reason,
                    hint=limit.instead,
                    source=limit.source,
                )


def _variables(content: FileContent, limit: Limit) -> Iterator[tuple[int, str, float]]:
    """Yield the line, the text and the value of each variable that is named after the flag."""
    name = re.compile(limit.variables)
    for each in (*content.assignments, *content.own, *content.defaults):
        # A share has a point; a whole number under such a name is one of GPUs or of GiB.
        number = "." in each.value and _NUMBER.fullmatch(each.value)
        if number and each.literal and name.fullmatch(each.name):
            yield each.line, f"{each.name}={each.value}", float(each.value)


def _flags(content: FileContent, limit: Limit) -> Iterator[GivenFlag]:
    """Yield the flags of servers whose number is known."""
    for command in content.commands:
        names = [flag.name.replace("_", "-") for flag in command.flags]
        if command.program == "vllm serve" and limit.unless not in names:
            for flag, plain in zip(command.flags, names, strict=True):
                if plain == limit.flag and flag.literal and _NUMBER.fullmatch(flag.value):
                    yield flag
