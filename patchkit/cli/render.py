"""Render what a verb yields below ``@rendered``: with --json each ``Record``, without the rest.

The rest: lines, findings, tables, and ``Data``, which programs read. ``ExitCode`` ends the verb.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import click

from patchkit.cli.next_step import spelled
from patchkit.cli.out import (
    LaidOut,
    Shown,
    as_json,
    data,
    print_json,
    say,
    style,
    table,
)
from patchkit.finding import Finding, Level
from patchkit.target import Load

F = TypeVar("F", bound=Callable[..., Any])

verbose_option = click.option("-v", "--verbose", is_flag=True, help="Show all of it.")

GOOD = style("✓", fg="green") + " "
BAD = style("✗", fg="red", bold=True) + " "

LOAD_STYLES: Mapping[Load, Mapping[str, Any]] = {
    Load.EXACT: {"fg": "green"},
    Load.FAMILY: {"fg": "green"},
    Load.COMPATIBLE: {"fg": "cyan"},
    Load.JIT: {"fg": "yellow"},
    Load.NONE: {"dim": True},
}
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


@dataclass(frozen=True, slots=True)
class Record:
    """A value for --json; ``line`` prints it as one line: an event of several."""

    value: object
    line: bool = False


@dataclass(frozen=True, slots=True)
class Data:
    """Text that programs read, without --json: printed byte for byte."""

    text: str


@dataclass(frozen=True, slots=True)
class ExitCode:
    """The code that a verb ends with; the highest of several counts."""

    code: int


Block = str | Finding | Record | Data | ExitCode


class VerbGroup(click.Group):
    """A verb of several: help has the first sentence of each, whole."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command and command.help and not command.hidden:
                first = " ".join(command.help.split("\n\n")[0].split())
                rows.append((name, first.partition(". ")[0].rstrip(".") + "."))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def rendered(verb: F) -> F:
    """Add --json to a verb, and print the blocks that it yields."""

    @as_json
    @functools.wraps(verb)
    def wrapped(*arguments: Any, as_json: bool, **options: Any) -> None:
        code = 0
        # Closed whatever happens: a folder that a verb unpacked is removed then.
        with contextlib.closing(verb(*arguments, **options)) as blocks:
            for block in blocks:
                if isinstance(block, ExitCode):
                    code = max(code, block.code)
                elif not isinstance(block, Record):
                    if not as_json:
                        print_block(block)
                elif as_json:
                    print_json(block.value, indent=None if block.line else 1)
        if code:
            raise SystemExit(code)

    return cast("F", wrapped)


def print_block(block: str | Finding | Data) -> None:
    if isinstance(block, Data):
        data(block.text)
    elif isinstance(block, Finding):
        for line in finding_blocks([block]):
            say(line)
    else:
        say(block)


def lead_word(text: str) -> Shown:
    """Return what a line to heed begins with: ``note``, ``known``, ``beware``."""
    return style(text, fg="yellow") + " "


def fact_lines(pairs: Mapping[str, object] | Iterable[tuple[str, object]]) -> Sequence[LaidOut]:
    """Return a block of names and values, without what is empty."""
    rows = pairs.items() if isinstance(pairs, Mapping) else pairs
    return table(
        ((style(name, dim=True), cell_text(value)) for name, value in rows if cell_text(value)),
        indent="  ",
    )


def cell_text(value: object) -> str:
    """Return a value as text: a sequence with commas, nothing for None."""
    if isinstance(value, str):
        return value  # a styled text stays one
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {it}" for name, it in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def counted_noun(count: int, noun: str, plural: str = "") -> str:
    """Return ``1 file``, ``2 files``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def gigabytes(size: float) -> str:
    """Return an amount of bytes as people read it."""
    for unit, bytes_per_unit in (("GB", 1e9), ("MB", 1e6)):
        if size >= bytes_per_unit / 10:
            return f"{size / bytes_per_unit:,.1f} {unit}"
    return f"{size / 1e3:,.1f} kB"


def finding_lines(findings: Sequence[Finding], *, verbose: bool) -> Iterator[Shown]:
    """Yield errors and warnings whole, then how many other findings there are; or all of them."""
    levels = (Level.ERROR, Level.WARNING, *((Level.NOTE,) if verbose else ()))
    yield from finding_blocks((it for it in findings if it.level in levels), verbose=verbose)
    for finding in sorted(findings, key=lambda it: it.level is Level.OK):
        is_check = finding.level in (Level.OK, Level.UNKNOWN)
        if is_check and (verbose or _is_gpu_unchecked(finding)):
            mark, how = _MARKS[finding.level]
            head = style(mark, **how) + " " + style(finding.where, bold=True)
            yield head + f"  {finding.about}: {finding.what}"
    yield finding_summary(findings)


def finding_blocks(findings: Iterable[Finding], *, verbose: bool = False) -> Iterator[Shown]:
    """Yield each finding whole; those of one place, reason and cure are one."""
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        place = f"{finding.where}:{finding.line}" if finding.where else finding.what
        key = (finding.level, place, finding.why, finding.hint)
        alike.setdefault(key, []).append(finding)
    for group in alike.values():
        yield from _finding_block(group, verbose=verbose)


def _finding_block(group: Sequence[Finding], *, verbose: bool) -> Iterator[Shown]:
    """Yield what is wrong in one place, why, and what to do."""
    first = group[0]
    mark, how = _MARKS[first.level]
    where = f"{first.where}:{first.line}" if first.line else first.where
    whats = [f"{it.about}: {it.what}" if it.about else it.what for it in group]
    head = style(mark, **how) + " " + (style(where, bold=True) if where else "")
    if len(whats) == 1:
        yield head + ("  " if where else "") + whats[0]
    else:
        yield head
        yield from (Shown("  ") + what for what in whats)
    yield from _labelled_lines("why", first.why)
    if first.sure and (verbose or first.level is Level.ERROR):
        known = "; ".join(filter(None, (first.sure, first.source, first.holds)))
        yield style(f"  sure:  {known}", dim=True)
    yield from _labelled_lines("next", spelled(first.hint))
    yield from _labelled_lines("costs", first.costs)


def _labelled_lines(name: str, text: str) -> Iterator[Shown]:
    for number, line in enumerate(filter(None, text.split("\n"))):
        yield Shown("  ") + (f"{name}:".ljust(7) if not number else " " * 7) + line


def _is_gpu_unchecked(finding: Finding) -> bool:
    """Return whether nothing can be called fine, since this was not checked."""
    return finding.level is Level.UNKNOWN and finding.about == "gpu-throttled"


def finding_summary(findings: Sequence[Finding]) -> Shown:
    """Return one line: how many findings there are of each level."""
    counts = Counter(finding.level for finding in findings)
    parts = [
        counted_noun(counts[level], *words) for level, words in _COUNTED.items() if counts[level]
    ]
    mark = GOOD
    if counts[Level.ERROR] or counts[Level.WARNING]:
        mark = BAD
    elif not counts[Level.OK] or any(map(_is_gpu_unchecked, findings)):
        mark = style("?", fg="cyan") + " "
    hidden = counts[Level.NOTE] or counts[Level.UNKNOWN]
    return mark + (", ".join(parts) or "nothing found") + ("; -v shows all" if hidden else "")
