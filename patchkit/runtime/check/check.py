"""Run all checks of a text, and leave out the findings that a comment silences."""

import re
from collections.abc import Sequence

from patchkit.finding import Finding, Findings
from patchkit.runtime.check.content import (
    ENV,
    SHELL,
    Assignment,
    CheckedText,
    build_finding,
    build_rule_finding,
)
from patchkit.runtime.check.formats import is_env_file
from patchkit.runtime.check.servers import (
    check_defaults,
    check_listeners,
    check_secrets,
    check_server_flags,
)
from patchkit.runtime.check.variable_checks import (
    check_contradictions,
    check_host,
    check_names,
    check_placeholders,
    check_values,
)
from patchkit.runtime.envfile.env_file import (
    MARK,
    fact_problems,
    head_facts,
    is_untouched,
)
from patchkit.runtime.rules.releases import read_env_data
from patchkit.runtime.rules.rule import load_variable_rules, select_entries
from patchkit.runtime.rules.secret_texts import find_code_risk

_BETWEEN_NODES = read_env_data("said")["variables"]["between_nodes"]
_LONGEST = 200  # lines at most between a finding and the comment above its command
_SHOWN = 60  # characters of a fact
_IGNORE = r"(?:#|;|//)\s*patchkit:\s*ignore\b[:\s\[(]*(?P<ids>[a-z0-9, -]*)"


def find_problems(checked: CheckedText) -> tuple[Finding, ...]:
    """Run all checks of a text, and return their findings in the order of lines.

    A comment ``# patchkit: ignore ID`` silences a finding, without an id all findings of its line.
    """
    checks = (
        _check_header,
        check_names,
        check_values,
        check_host,
        check_placeholders,
        check_secrets,
        check_defaults,
        check_contradictions,
        check_listeners,
        _check_line_syntax,
        check_server_flags,
        _check_advice,
    )

    findings = list(checked.content.problems)
    for check in checks:
        findings += check(checked)

    if "patchkit:" in checked.text:
        lines = ["", *checked.text.split("\n"), ""]
        findings = [row for row in findings if not _is_silenced(row, lines)]

    # dict.fromkeys removes a finding that two checks have in common.
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: finding.line))


def _is_silenced(finding: Finding, lines: Sequence[str]) -> bool:
    """Return whether a comment on the line of a finding, or above its command, silences it."""
    above = max(finding.line - 1, 0)
    highest = finding.line - _LONGEST

    # A line that ends with a backslash cannot have a comment. So a comment above the first line of
    # the command counts.
    while above > highest and lines[above].rstrip().endswith("\\"):
        above -= 1

    for line in (lines[above], lines[finding.line]):
        if mark := re.search(_IGNORE, line):
            ids = mark["ids"].replace(",", " ").split()
            if not ids or finding.id in ids:
                return True

    return False


def _check_header(checked: CheckedText) -> Findings:
    """Yield what is wrong with an env file that patchkit wrote; nothing for other files.

    There is a finding if the file was edited, if its first line has a malformed fact, or if it sets
    a variable that makes vLLM run code and that no rule sets.
    """
    if not checked.text.startswith(f"# {MARK}"):
        return

    if not is_untouched(checked.text):
        yield build_finding("edited", 1)

    facts = head_facts(checked.text)
    for name, problem in fact_problems(facts).items():
        shown = f"{name}={facts[name][:_SHOWN]}"
        yield build_finding("header-fact", 1, shown=shown, name=name, problem=problem)

    for variable in checked.content.assignments:
        reason = find_code_risk(variable.name)
        if reason and not _is_set_by_rule(variable):
            yield build_finding("runs-code", variable, reason=reason)


def _is_set_by_rule(variable: Assignment) -> bool:
    """Return whether a rule sets this variable to this value.

    For ``{ptxas}`` in the rule's value, any absolute path of ptxas fits.
    """
    for rule in load_variable_rules().rules:
        if variable.name in rule.set:
            form = re.escape(rule.set[variable.name])
            form = form.replace(r"\{ptxas\}", "/[^\n]*/ptxas")
            if re.fullmatch(form, variable.value):
                return True

    return False


def _check_line_syntax(checked: CheckedText) -> Findings:
    """Yield a finding for each kind of line that sh, systemd and docker read differently.

    The finding names the first such line of an env file or a script, and the number of others.
    """
    text = checked.text
    kind = checked.content.kind
    # In YAML, Dockerfiles and units, a CR before the line's end is not part of a value.
    if kind not in (ENV, SHELL):
        return
    if "\r\n" in text:
        yield build_finding("crlf", 1)

    # A file of patchkit names its format in its first line, so it is for one program only.
    if "format" in head_facts(text):
        return

    key = "form" if kind == ENV and is_env_file(text) else "shell_form"
    lines = text.replace("\r\n", "\n").split("\n")

    for finding_id, row in read_env_data("findings").items():
        if key not in row:
            continue

        places = [
            Assignment(number, match["name"], "")
            for number, line in enumerate(lines, 1)
            if (match := re.match(row[key], line))
        ]
        if places:
            first = places[0]
            more = f" and {len(places) - 1} more" if places[1:] else ""
            yield build_finding(finding_id, first, names=first.name + more)


def _check_advice(checked: CheckedText) -> Findings:
    """Yield the known problems of the text's versions that its variables do not solve.

    A text without a role counts as a head's if it sets variables for traffic between nodes.
    """
    values = {row.name: row.value for row in checked.content.assignments}
    situation = {**checked.situation}

    if not checked.role and not values.keys().isdisjoint(_BETWEEN_NODES):
        situation["role"] = "head"

    for advice in select_entries(load_variable_rules().advice, situation):
        if advice.solved(values):
            continue

        stated = (row.line for row in checked.versions if row.project in advice.when)
        facts = " and ".join(f"{name} {situation[name]}" for name in advice.when)

        line = next(stated, 1)
        yield build_rule_finding(advice, line, advice.says, f"Known of {facts}.")
