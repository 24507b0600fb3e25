"""Check what a file or a server says: names, values, flags, contradictions, secrets, this host."""

from __future__ import annotations

import re
from collections.abc import Iterable

from patchkit.finding import Finding
from patchkit.runtime.check.exposure import check_secrets, check_servers
from patchkit.runtime.check.flags import check_flags
from patchkit.runtime.check.names import check_names
from patchkit.runtime.check.nodes import check_advice, check_containers, check_host, check_ray
from patchkit.runtime.check.own_files import check_header, check_line_syntax
from patchkit.runtime.check.situation import CheckedText
from patchkit.runtime.check.values import check_contradictions, check_placeholders, check_values

_CHECKS = (
    *(check_header, check_names, check_values, check_host, check_placeholders, check_secrets),
    *(check_contradictions, check_servers, check_containers, check_line_syntax, check_flags),
    *(check_ray, check_advice),
)
_LONGEST = 200  # lines of a command, from a finding up to the comment above it
_IGNORE = re.compile(r"(?:#|;|//)\s*patchkit:\s*ignore\b[:\s\[(]*(?P<ids>[a-z0-9, -]*)")


def find_problems(checked: CheckedText) -> tuple[Finding, ...]:
    """Return what is wrong, in the order of the lines, without what a comment silences."""
    findings = [*checked.content.problems]
    for check in _CHECKS:
        findings += check(checked)
    # Two checks may come to the same finding.
    unique = dict.fromkeys(_without_ignored(checked.text, findings))
    return tuple(sorted(unique, key=lambda finding: finding.line))


def _without_ignored(text: str, findings: Iterable[Finding]) -> Iterable[Finding]:
    """Yield the findings but those with `# patchkit: ignore` on their line, or above it."""
    if "patchkit:" not in text:
        yield from findings
        return
    lines = ["", *text.split("\n"), ""]
    for finding in findings:
        # A continued line has no room for a comment: that above the command counts.
        above = max(finding.line - 1, 0)
        while above > finding.line - _LONGEST and lines[above].rstrip().endswith("\\"):
            above -= 1
        marks = map(_IGNORE.search, (lines[above], lines[finding.line]))
        silenced = [set(mark["ids"].replace(",", " ").split()) for mark in marks if mark]
        if not any(not ids or finding.id in ids for ids in silenced):
            yield finding
