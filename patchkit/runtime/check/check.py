"""Check what a file or a server says: names, values, flags, contradictions, secrets, this host."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit.finding import Finding
from patchkit.runtime.check.content import FileContent
from patchkit.runtime.check.exposure import check_secrets, check_servers
from patchkit.runtime.check.flags import FlagCheck
from patchkit.runtime.check.host_names import check_host
from patchkit.runtime.check.names import NameCheck
from patchkit.runtime.check.nodes import check_advice, check_containers, check_ray
from patchkit.runtime.check.own_files import check_header, check_syntax
from patchkit.runtime.check.values import check_contradictions, check_placeholders, check_values
from patchkit.runtime.check.versions import StatedVersion
from patchkit.runtime.host.host import Host
from patchkit.runtime.rules.condition import Situation

_IGNORE = re.compile(r"(?:#|;|//)\s*patchkit:\s*ignore\b[:\s\[(]*(?P<ids>[a-z0-9, -]*)")


@dataclass(frozen=True, kw_only=True)
class CheckedText:
    """What is checked: a text with its name, what it says, and what is known of its machine.

    ``host`` is the machine that is to use it, None for any; ``home`` the folder of its vLLM, whose
    names count instead of those of the version in ``situation``; ``mode`` the file's rights.
    """

    text: str
    where: str
    content: FileContent
    situation: Situation
    versions: Sequence[StatedVersion] = ()
    host: Host | None = None
    home: Path | None = None
    mode: int | None = None


def find_problems(checked: CheckedText) -> tuple[Finding, ...]:
    """Return what is wrong, in the order of the lines, without what a comment silences."""
    text, content, situation = checked.text, checked.content, checked.situation
    home, host = checked.home, checked.host
    findings = [
        *content.problems,
        *check_header(text, content.assignments),
        *NameCheck(text=text, content=content, situation=situation, home=home).find_problems(),
        *check_values(content, situation, home),
        *(check_host(content.assignments, host) if host else ()),
        *check_placeholders(content, checked.where),
        *check_secrets(text, content, checked.where, checked.mode),
        *check_contradictions(content, host),
        *check_servers(text, content),
        *check_containers(content),
        *check_syntax(text, content),
        *FlagCheck(content=content, situation=situation, home=home).find_problems(),
        *check_ray(text, content, situation),
        *check_advice(content, situation, checked.versions),
    ]
    # Two checks may come to the same finding.
    unique = dict.fromkeys(_without_ignored(text, findings))
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
        while lines[above].rstrip().endswith("\\"):
            above -= 1
        marks = map(_IGNORE.search, (lines[above], lines[finding.line]))
        silenced = [set(mark["ids"].replace(",", " ").split()) for mark in marks if mark]
        if not any(not ids or finding.id in ids for ids in silenced):
            yield finding
