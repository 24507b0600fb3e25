"""Check env files: edits of patchkit's own, and what sh, systemd and docker read differently."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from patchkit.finding import Finding
from patchkit.runtime.check.content import ENV, Assignment
from patchkit.runtime.check.formats import is_env_file
from patchkit.runtime.check.messages import make_finding
from patchkit.runtime.check.situation import CheckedText
from patchkit.runtime.envfile.facts import fact_problems
from patchkit.runtime.envfile.header import bears_mark, head_facts, untouched
from patchkit.runtime.rules.sensitive_names import runs_code
from patchkit.runtime.rules.variable_rules import load_variable_rules

# What a rule's {facts} may stand for; a value of another form was set by no rule.
_FACTS = {"ptxas": "/[^\n]*/ptxas"}
_NAME = r"\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)="
_DIFFERENCES = {
    "export-in-env-file": re.compile(r"\s*export\s+(?P<name>\w+)="),
    "comment-behind-value": re.compile(_NAME + r"(?:'[^']*'|\"[^\"]*\"|[^'\"\s#]*)\s+#"),
    "quotes": re.compile(_NAME + r"['\"]"),
    "blanks-in-value": re.compile(_NAME + r"[^'\"\s]+\s+[^\s#]"),
    "dollar-in-value": re.compile(_NAME + r"[^'$]*\$"),
}


def check_header(checked: CheckedText) -> Iterator[Finding]:
    """Yield what is wrong in a file with patchkit's first line; nothing of a file of others."""
    text = checked.text
    if not bears_mark(text):
        return
    facts = head_facts(text)
    if not untouched(text):
        yield make_finding("edited", 1)
    for name, problem in fact_problems(facts).items():
        shown = f"{name}={facts[name][:60]}"
        yield make_finding("header-fact", 1, shown=shown, name=name, problem=problem)
    for assignment in checked.content.assignments:
        values = _values_of_rules().get(assignment.name, ())
        by_rule = any(form.fullmatch(assignment.value) for form in values)
        if (reason := runs_code(assignment.name)) and not by_rule:
            yield make_finding("runs-code", assignment, reason=reason)


@cache
def _values_of_rules() -> Mapping[str, Sequence[re.Pattern[str]]]:
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


def check_line_syntax(checked: CheckedText) -> Iterator[Finding]:
    """Yield what sh, systemd and docker read differently, each kind of difference once."""
    text = checked.text
    if "\r\n" in text:
        yield make_finding("crlf", 1)
    # A file of patchkit's own says what reads it.
    if "format" in head_facts(text) or checked.content.kind != ENV or not is_env_file(text):
        return
    places: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        for key, form in _DIFFERENCES.items():
            if match := form.match(line):
                places.setdefault(key, []).append((number, match["name"]))
    for key, found in places.items():
        number, name = found[0]
        more = f" and {len(found) - 1} more" if found[1:] else ""
        yield make_finding(key, Assignment(number, name, ""), names=name + more)
