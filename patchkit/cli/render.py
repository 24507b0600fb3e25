"""Render what a verb yields below ``@rendered``: with --json each ``Record``, without the rest.

The rest: lines, findings, tables, and ``Data``, which programs read. ``ExitCode`` ends the verb.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import click

from patchkit.cli.out import (
    LaidOut,
    Shown,
    as_json,
    data,
    print_json,
    say,
    spelled,
    style,
    table,
)
from patchkit.cli.verbs import MEANT
from patchkit.errors import UsageError
from patchkit.finding import Finding, Level
from patchkit.quoting import quoted
from patchkit.target import Load

F = TypeVar("F", bound=Callable[..., Any])
Option = Callable[[Any], Any]

verbose_option = click.option("-v", "--verbose", is_flag=True, help="Show all of it.")

GOOD = style("✓", fg="green") + " "
BAD = style("✗", fg="red", bold=True) + " "
UNSURE = style("?", fg="cyan") + " "

LOAD_STYLES: Mapping[Load, Mapping[str, Any]] = {
    Load.EXACT: {"fg": "green"},
    Load.FAMILY: {"fg": "green"},
    Load.COMPATIBLE: {"fg": "cyan"},
    Load.JIT: {"fg": "yellow"},
    Load.NONE: {"dim": True},
}
MARKS: Mapping[Level, tuple[str, Mapping[str, Any]]] = {
    Level.ERROR: ("✗", {"fg": "red", "bold": True}),
    Level.WARNING: ("!", {"fg": "yellow"}),
    Level.NOTE: ("-", {"dim": True}),
    Level.UNKNOWN: ("?", {"fg": "cyan"}),
    Level.OK: ("✓", {"fg": "green"}),
}
# Of other levels their names are counted.
_COUNTED = {Level.UNKNOWN: "not checked", Level.OK: "fine"}


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


Block = str | Record | Data | ExitCode


class VerbGroup(click.Group):
    """A verb of several: help has the first sentence of each, whole."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, *rest = args
        names = self.list_commands(ctx)
        if name in names or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        verb = str(ctx.info_name)
        close = difflib.get_close_matches(name, names, n=1)
        words = [verb, *close, *rest] if close else MEANT.get(name, "").split()
        raise UsageError(
            f"`patchkit {verb}` has no command {name!r}; it has {', '.join(names)}",
            hint=quoted("patchkit", *(words or [verb, "--help"])),
        )

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command and command.help and not command.hidden:
                first = " ".join(command.help.split("\n\n")[0].split())
                rows.append((name, first.partition(". ")[0].rstrip(".") + "."))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def read_numbers(
    _: click.Context, option: click.Parameter, text: str | None
) -> tuple[int, ...]:
    """Return the whole numbers of an option's text; the callback of options that take several."""
    numbers = text.split(",") if text else []
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise UsageError(
            f"{option.opts[-1]} takes whole numbers with commas, not {text!r}"
        )
    return tuple(map(int, numbers))


def with_options(*options: Option) -> Callable[[F], F]:
    """Return a decorator that adds options to a verb; help shows them in this order."""
    return lambda verb: functools.reduce(
        lambda made, add: add(made), reversed(options), verb
    )


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
                elif isinstance(block, Record):
                    if as_json:
                        print_json(block.value, indent=None if block.line else 1)
                elif as_json:
                    continue
                elif isinstance(block, Data):
                    data(block.text)
                else:
                    say(block)
        if code:
            raise SystemExit(code)

    return cast("F", wrapped)


def lead_word(text: str) -> Shown:
    """Return what a line to heed begins with: ``note``, ``known``, ``beware``."""
    return style(text, fg="yellow") + " "


def fact_lines(
    pairs: Mapping[str, object] | Iterable[tuple[str, object]],
) -> Sequence[LaidOut]:
    """Return a block of names and values, without what is empty."""
    rows = pairs.items() if isinstance(pairs, Mapping) else pairs
    return table(
        (
            (style(name, dim=True), cell_text(value))
            for name, value in rows
            if cell_text(value)
        ),
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
    yield from finding_blocks(
        (it for it in findings if it.level in levels), verbose=verbose
    )
    for finding in sorted(findings, key=lambda it: it.level is Level.OK):
        is_check = finding.level in (Level.OK, Level.UNKNOWN)
        if is_check and (verbose or _is_gpu_unchecked(finding)):
            mark, how = MARKS[finding.level]
            head = style(mark, **how) + " " + style(finding.where, bold=True)
            yield head + f"  {finding.about}: {finding.what}"
    yield finding_summary(findings)


def finding_blocks(
    findings: Iterable[Finding], *, verbose: bool = False
) -> Iterator[Shown]:
    """Yield each finding whole; those of one place, reason and cure are one."""
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        place = f"{finding.where}:{finding.line}" if finding.where else finding.what
        key = (finding.level, place, finding.why, finding.hint)
        alike.setdefault(key, []).append(finding)
    for first, *others in alike.values():
        mark, how = MARKS[first.level]
        where = f"{first.where}:{first.line}" if first.line else first.where
        head = style(mark, **how) + " " + style(where, bold=True)
        whats = [
            f"{it.about}: {it.what}" if it.about else it.what for it in (first, *others)
        ]
        if others:
            yield head
            yield from (Shown("  ") + what for what in whats)
        else:
            yield head + ("  " if where else "") + whats[0]
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
        counted_noun(counts[it], _COUNTED.get(it, it), _COUNTED.get(it, ""))
        for it in Level
        if counts[it]
    ]
    mark = GOOD
    if counts[Level.ERROR] or counts[Level.WARNING]:
        mark = BAD
    elif not counts[Level.OK] or any(map(_is_gpu_unchecked, findings)):
        mark = style("?", fg="cyan") + " "
    hidden = counts[Level.NOTE] or counts[Level.UNKNOWN]
    return (
        mark
        + (", ".join(parts) or "nothing found")
        + ("; -v shows all" if hidden else "")
    )
