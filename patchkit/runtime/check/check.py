"""Check what a file says; of env files also edits, and what their readers differ in."""

from __future__ import annotations

import re
from collections.abc import Iterator

from patchkit.finding import Finding
from patchkit.runtime.check.content import ENV, Assignment, build_finding, rule_finding
from patchkit.runtime.check.formats import is_env_file
from patchkit.runtime.check.servers import (
    check_defaults,
    check_secrets,
    check_server_flags,
    check_servers,
)
from patchkit.runtime.check.settings import (
    check_contradictions,
    check_host,
    check_names,
    check_placeholders,
    check_values,
)
from patchkit.runtime.check.situation import CheckedText
from patchkit.runtime.envfile.header import MARK, fact_problems, head_facts, is_untouched
from patchkit.runtime.rules.rule import holding
from patchkit.runtime.rules.sensitive_names import runs_code
from patchkit.runtime.rules.variable_rules import load_variable_rules

_LONGEST = 200  # lines of a command, from a finding up to the comment above it
_IGNORE = re.compile(r"(?:#|;|//)\s*patchkit:\s*ignore\b[:\s\[(]*(?P<ids>[a-z0-9, -]*)")
# Nobody sets these for a node alone; still they are no proof of others.
_BETWEEN_NODES = {"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES"}
_NAME = r"\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)="
_DIFFERENCES = {
    "export-in-env-file": re.compile(r"\s*export\s+(?P<name>\w+)="),
    "comment-behind-value": re.compile(_NAME + r"(?:'[^']*'|\"[^\"]*\"|[^'\"\s#]*)\s+#"),
    "quotes": re.compile(_NAME + r"['\"]"),
    "blanks-in-value": re.compile(_NAME + r"[^'\"\s]+\s+[^\s#]"),
    "dollar-in-value": re.compile(_NAME + r"[^'$]*\$"),
}


def find_problems(checked: CheckedText) -> tuple[Finding, ...]:
    """Return what is wrong, in the order of the lines, without what a comment silences."""
    checks = (
        *(_check_header, check_names, check_values, check_host, check_placeholders),
        *(check_secrets, check_defaults, check_contradictions, check_servers),
        *(_check_line_syntax, check_server_flags, _check_advice),
    )
    findings = [*checked.content.problems]
    for check in checks:
        findings += check(checked)
    lines = ["", *checked.text.split("\n"), ""] if "patchkit:" in checked.text else []
    kept = {}
    for finding in findings:
        # A continued line has no room for a comment: that above the command counts.
        above = max(finding.line - 1, 0)
        while lines and above > finding.line - _LONGEST and lines[above].rstrip().endswith("\\"):
            above -= 1
        marks = map(_IGNORE.search, (lines[above], lines[finding.line]) if lines else ())
        silenced = [mark["ids"].replace(",", " ").split() for mark in marks if mark]
        if not any(not ids or finding.id in ids for ids in silenced):
            kept[finding] = finding.line  # two checks may come to the same finding
    return tuple(sorted(kept, key=lambda finding: finding.line))


def _check_header(checked: CheckedText) -> Iterator[Finding]:
    """Yield what is wrong in a file with patchkit's first line; nothing of a file of others."""
    text = checked.text
    if not text.startswith(f"# {MARK}"):
        return
    facts = head_facts(text)
    if not is_untouched(text):
        yield build_finding("edited", 1)
    for name, problem in fact_problems(facts).items():
        shown = f"{name}={facts[name][:60]}"
        yield build_finding("header-fact", 1, shown=shown, name=name, problem=problem)
    for assignment in checked.content.assignments:
        if reason := runs_code(assignment.name):
            rules = [
                rule.set for rule in load_variable_rules().rules if assignment.name in rule.set
            ]
            # A rule's own value may stand there, with a path of ptxas in the place of its fact.
            forms = (
                re.escape(by_name[assignment.name]).replace(r"\{ptxas\}", "/[^\n]*/ptxas")
                for by_name in rules
            )
            if not any(re.fullmatch(form, assignment.value) for form in forms):
                yield build_finding("runs-code", assignment, reason=reason)


def _check_line_syntax(checked: CheckedText) -> Iterator[Finding]:
    """Yield what sh, systemd and docker read differently, each kind of difference once."""
    text = checked.text
    if "\r\n" in text:
        yield build_finding("crlf", 1)
    # A file of patchkit's own says what reads it.
    if "format" in head_facts(text) or checked.content.kind != ENV or not is_env_file(text):
        return
    lines = text.replace("\r\n", "\n").split("\n")
    for key, form in _DIFFERENCES.items():
        matches = [(number, form.match(line)) for number, line in enumerate(lines, 1)]
        found = [(number, match["name"]) for number, match in matches if match]
        if found:
            number, name = found[0]
            more = f" and {len(found) - 1} more" if found[1:] else ""
            yield build_finding(key, Assignment(number, name, ""), names=name + more)


def _check_advice(checked: CheckedText) -> Iterator[Finding]:
    """Yield what the rules know of these versions in a cluster, which no rule mends."""
    values = {found.name: found.value for found in checked.content.assignments}
    situation = checked.situation
    if not situation.get("role") and values.keys() & _BETWEEN_NODES:
        situation = {**situation, "role": "head"}
    for advice in holding(load_variable_rules().advice, situation):
        if not advice.solved(values):
            stated = (found.line for found in checked.versions if found.project in advice.when)
            facts = " and ".join(f"{name} {situation[name]}" for name in advice.when)
            yield rule_finding(advice, next(stated, 1), advice.says, f"Known of {facts}.")
