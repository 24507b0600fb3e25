"""Show findings: what is wrong first, each with its cause and what cures it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from patchkit.cli.out import Shown, style
from patchkit.finding import Finding, Level
from patchkit.runtime.rules.secret_texts import mask_secrets

_MARKS: Mapping[Level, tuple[str, Mapping[str, Any]]] = {
    Level.ERROR: ("✗", {"fg": "red", "bold": True}),
    Level.WARNING: ("!", {"fg": "yellow"}),
    Level.NOTE: ("-", {"dim": True}),
    Level.UNKNOWN: ("?", {"fg": "cyan"}),
    Level.OK: ("✓", {"fg": "green"}),
}
_COUNTED = {
    Level.ERROR: ("error", "errors"),
    Level.WARNING: ("warning", "warnings"),
    Level.NOTE: ("note", "notes"),
    Level.UNKNOWN: ("not checked", "not checked"),
    Level.OK: ("fine", "fine"),
}


def without_secrets(found: Finding) -> Finding:
    """Return a finding that quotes a log or an error, without the secrets in it."""
    what, why, hint = map(mask_secrets, (found.what, found.why, found.hint))
    return replace(found, what=what, why=why, hint=hint)


def finding_lines(findings: Sequence[Finding], *, verbose: bool) -> Iterator[Shown]:
    """Yield errors and warnings whole, then how many other findings there are; or all of them."""
    shown = (Level.ERROR, Level.WARNING, *((Level.NOTE,) if verbose else ()))
    for each in findings:
        if each.level in shown:
            yield from _finding_block(each, verbose=verbose)
    yield from _checked_lines(findings if verbose else filter(_is_gpu_unchecked, findings))
    yield summary(findings)


def _checked_lines(findings: Iterable[Finding]) -> Iterator[Shown]:
    """Yield what was not checked, and what is fine; checks with the same to say in one line."""
    groups: dict[tuple[Level, str, str], list[str]] = {}
    for each in findings:
        if each.level in (Level.UNKNOWN, Level.OK):
            groups.setdefault((each.level, each.where, each.what), []).append(each.about)
    for (level, where, what), checks in sorted(
        groups.items(), key=lambda each: each[0][0] is Level.OK
    ):
        mark, how = _MARKS[level]
        yield style(mark, **how) + " " + style(where, bold=True) + f"  {', '.join(checks)}: {what}"


def _is_gpu_unchecked(finding: Finding) -> bool:
    """Return whether nothing can be called fine, since this was not checked."""
    return finding.level is Level.UNKNOWN and finding.about == "gpu-throttled"


def summary(findings: Sequence[Finding]) -> Shown:
    """Return one line: how many findings there are of each level."""
    counts = Counter(each.level for each in findings)
    parts = [
        f"{counts[level]} {words[counts[level] != 1]}"
        for level, words in _COUNTED.items()
        if counts[level]
    ]
    bad = counts[Level.ERROR] or counts[Level.WARNING]
    mark = style("✗", fg="red") if bad else style("✓", fg="green")
    if not bad and (not counts[Level.OK] or any(map(_is_gpu_unchecked, findings))):
        mark = style("?", fg="cyan")
    hidden = [each for each in (Level.NOTE, Level.UNKNOWN) if counts[each]]
    return mark + f" {', '.join(parts) or 'nothing found'}" + ("; -v shows all" if hidden else "")


def _finding_block(each: Finding, *, verbose: bool) -> Iterator[Shown]:
    mark, how = _MARKS[each.level]
    where = f"{each.where}:{each.line}" if each.line else each.where
    yield style(mark, **how) + " " + style(where, bold=True) + f"  {each.about}: {each.what}"
    yield from _labelled_lines("why", each.why)
    if each.sure and (verbose or each.level is Level.ERROR):
        known = "; ".join(filter(None, (each.sure, each.source, each.holds)))
        yield style(f"  sure:  {known}", dim=True)
    yield from _labelled_lines("next", each.hint)
    yield from _labelled_lines("costs", each.costs)


def _labelled_lines(name: str, text: str) -> Iterator[Shown]:
    for number, line in enumerate(filter(None, text.split("\n"))):
        yield Shown("  ") + (f"{name}:".ljust(7) if not number else " " * 7) + line
