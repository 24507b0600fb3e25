"""Check a file that says patchkit wrote it: whether it is so, and what does not belong in it."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from patchkit.finding import Finding, Level
from patchkit.runtime.envfile.facts import fact_problems
from patchkit.runtime.envfile.header import bears_mark, head_facts, untouched
from patchkit.runtime.files.content import Assignment
from patchkit.runtime.rules.sensitive_names import runs_code
from patchkit.runtime.rules.variable_rules import load_variable_rules

_AGAIN = "write it anew with `patchkit env`"
# What a rule's {facts} may stand for; a value of another form was set by no rule.
_FACTS = {"ptxas": "/[^\n]*/ptxas"}


def check_header(text: str, assigned: Sequence[Assignment]) -> Iterator[Finding]:
    """Return what is wrong in a file with patchkit's first line; nothing of a file of others."""
    if not bears_mark(text):
        return
    facts = head_facts(text)
    if not untouched(text):
        yield Finding(
            line=1,
            level=Level.WARNING,
            what="edited after patchkit wrote it: its digest is not that of the text",
            why="The digest says that something was changed, not what."
            if facts
            else "The first line has no digest, or is not as patchkit writes it.",
            hint=_AGAIN,
        )
    for name, problem in fact_problems(facts).items():
        yield Finding(
            line=1,
            what=f"{name}={facts[name][:60]}: {name} {problem}",
            why="The other nodes go by this fact.",
            hint=_AGAIN,
        )
    for each in assigned:
        by_rule = any(value.fullmatch(each.value) for value in _values().get(each.name, ()))
        if (reason := runs_code(each.name)) and not by_rule:
            yield each.error(
                f"{each.shown} runs code, and no rule of patchkit sets it",
                why=f"Through it, {reason}.",
                hint="take it out; set it where vLLM is started on this node, if it is yours",
                source="recipes/env/code.toml",
            )


@cache
def _values() -> Mapping[str, Sequence[re.Pattern[str]]]:
    """Return the values that rules set for each variable that runs code."""
    values: dict[str, list[re.Pattern[str]]] = {}
    for rule in load_variable_rules().rules:
        for name, value in rule.set.items():
            if runs_code(name):
                parts = (
                    re.escape(text) + _FACTS.get(fact or "", "")
                    for text, fact, _spec, _conversion in string.Formatter().parse(value)
                )
                values.setdefault(name, []).append(re.compile("".join(parts)))
    return values
