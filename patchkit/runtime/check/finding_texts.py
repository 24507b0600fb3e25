"""Build the findings of `patchkit check` from the texts of findings.toml or from a rule."""

from __future__ import annotations

from patchkit.errors import SourceError
from patchkit.finding import Finding, Level
from patchkit.runtime.check.content import Assignment, GivenFlag
from patchkit.runtime.rules.releases import read_env_data
from patchkit.runtime.rules.variable_rules import Avoid, VariableAdvice

_TEXT_FIELDS = ("what", "why", "hint", "source")


def build_finding(
    finding_id: str,
    place: int | Assignment | GivenFlag,
    *,
    level: Level | None = None,
    is_error: bool = False,
    **fields: object,
) -> Finding:
    """Return the finding that findings.toml has for an id, with ``fields`` filled into its texts.

    ``place`` is what it is about: the number of a line, a variable or a flag. ``level`` replaces
    the level of findings.toml, and ``is_error`` makes it an error in any case.
    """
    row = read_env_data("findings")[finding_id]
    if is_error:
        level = Level.ERROR

    if isinstance(place, int):
        line = place
        about = ""
    else:
        line = place.line
        about = place.name
        fields = {"shown": place.shown, "name": about, **fields}

    texts = {}
    for part in _TEXT_FIELDS:
        if part in row:
            texts[part] = row[part].format(**fields)

    return Finding(
        id=finding_id,
        line=line,
        about=about,
        level=level or Level(row["level"]),
        kind=SourceError,
        **texts,
    )


def build_rule_finding(
    rule: Avoid | VariableAdvice,
    line: int,
    what: str,
    why: str,
    about: str = "",
) -> Finding:
    """Return a finding with the id, the severity, the advice and the source of a rule."""
    return Finding(
        id=rule.id,
        line=line,
        about=about,
        level=Level(rule.severity),
        kind=SourceError,
        what=what,
        why=why,
        hint=rule.instead,
        source=rule.source,
    )
