"""Read the options of verbs, and print the blocks that a verb with ``@rendered`` yields.

With --json each dict and ``Record`` is printed, and nothing else. Without --json everything else is
printed: lines, findings, tables, and ``Data`` for programs. ``ExitCode`` sets the verb's exit code.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import Any, cast

import click

from patchkit.cli.out import (
    LaidOut,
    Shown,
    bold,
    data,
    dim,
    print_json,
    say,
    spelled,
    style,
    table,
)
from patchkit.cli.verbs import SYNONYMS
from patchkit.errors import PatchkitError, UsageError
from patchkit.finding import Finding, Level
from patchkit.frozen import Fields, Texts, positional
from patchkit.quoting import quoted
from patchkit.records import RECIPES, read_toml
from patchkit.target import Load, targets

Verb = Callable[..., Any]
Option = Callable[[Any], Any]
Row = Texts
Lines = Iterator[str]

_TABLES = read_toml(dict[str, Fields], RECIPES / "cli/options.toml")


def option(*words: str, **settings: Any) -> Option:
    """Return an option. The last word is its help, the others its names, as in ``--jobs N``."""
    *declarations, text = words
    names = []
    for declaration in declarations:
        name, _, metavar = declaration.partition(" ")
        names.append(name)
        if metavar:
            settings["metavar"] = metavar
    return click.option(*names, help=text, **settings)


@functools.cache
def _option_types() -> Fields:
    """Return the types of options by their names in options.toml."""
    # `patchkit --help` has no such option, and does without these modules.
    from patchkit.runtime.node.topology import check_ipv4
    from patchkit.runtime.rules.rule import CHOICES

    return {
        "number": int,
        "path": click.Path(path_type=Path),
        "present path": click.Path(path_type=Path, exists=True),
        "folder": click.Path(path_type=Path, exists=True, file_okay=False),
        "path or -": click.Path(path_type=Path, allow_dash=True),
        "address": check_ipv4,
        "device": click.Choice(list(targets())),
        "role": click.Choice(CHOICES["role"]),
        "quantization": click.Choice(CHOICES["quantization"]),
    }


# Keys of a row → the function that makes its type.
_MAKERS: Fields = {
    "choices": click.Choice,
    "range": lambda limits: click.IntRange(**limits),
    "type": lambda name: _option_types()[name],
}


def options_of(verb: str) -> Callable[[Verb], Verb]:
    """Return a decorator that adds a verb's arguments and options, in their order there."""
    shared = _TABLES["shared"]
    rows = [shared.get(str(row), row) for row in _TABLES["verb"][verb]]
    return with_options(*map(_read_option, rows))


def _read_option(row: Fields) -> Option:
    settings = {**row}
    for key in _MAKERS.keys() & row.keys():
        settings["type"] = _MAKERS[key](settings.pop(key))

    if "argument" in row:
        return click.argument(settings.pop("argument"), cls=FilledArgument, **settings)
    return option(*settings.pop("words"), **settings)


Style = Fields
"""Keyword arguments of ``style``."""

STYLES = RECIPES / "cli/styles.toml"
LOAD_STYLES = read_toml(dict[str, Style], STYLES, key="load")
MARKS = read_toml(dict[str, tuple[str, Style]], STYLES, key="level")
_WHOLE = 1000  # characters of a command's help: so many that click cuts nothing off
# Levels that a summary does not count by their names.
_COUNTED = {Level.UNKNOWN: "not checked", Level.OK: "fine"}


def mark(level: Level) -> Shown:
    """Return the sign that the line of a finding begins with."""
    sign, styles = MARKS[level]
    return style(sign, **styles) + " "


GOOD = mark(Level.OK)
BAD = mark(Level.ERROR)
UNSURE = mark(Level.UNKNOWN)


@positional
class Record:
    """A value for --json that is no dict; ``line`` prints it as one line, as for an event."""

    value: object
    line: bool = False


class Data(str):
    """Text for programs that is printed byte for byte, but not with --json."""

    __slots__ = ()


@positional
class ExitCode:
    """The exit code of a verb; if it yields several, the highest counts."""

    code: int


Block = str | Fields | Record | ExitCode
Blocks = Iterator[Block]


class FilledArgument(click.Argument):
    """An argument that refuses an empty text, which a path would take for the current folder."""

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        words = value if isinstance(value, tuple) else (value,)
        if "" in words:
            raise click.BadParameter("it is empty, like an unset variable", ctx, self)

        return super().process_value(ctx, value)


class VerbGroup(click.Group):
    """A verb with commands; its help shows the whole first sentence of each.

    A first word that is no command belongs to ``default_command``, if there is one.
    """

    default_command = ""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, *words = args
        names = self.list_commands(ctx)
        if self.default_command and name not in names:
            return super().resolve_command(ctx, [self.default_command, *args])
        if name in names or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)

        from difflib import get_close_matches  # seldom needed, and slow to load

        similar = get_close_matches(SYNONYMS.get(name, name), names, n=1)
        completed = [*similar, *words] if similar else ["--help"]
        raise UsageError(
            f"`{ctx.command_path}` has no command {name!r}",
            hint=quoted(*ctx.command_path.split(), *completed),
        )

    def format_commands(  # click's signature
        self,
        ctx: click.Context,  # noqa: ARG002
        formatter: click.HelpFormatter,
    ) -> None:
        rows = [
            (name, command.get_short_help_str(_WHOLE))
            for name, command in sorted(self.commands.items())
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def with_options(*options: Option) -> Callable[[Verb], Verb]:
    """Return a decorator that adds options to a verb; help shows them in this order."""

    def decorate(verb: Verb) -> Verb:
        for add_option in reversed(options):
            verb = add_option(verb)
        return verb

    return decorate


def rendered(verb: Callable[..., Iterator[Block]]) -> Verb:
    """Add --json to a verb, and print the blocks that it yields."""

    @options_of("json")
    @functools.wraps(verb)
    def wrapped(*arguments: Any, as_json: bool, **options: Any) -> None:
        exit_code = 0
        document: Fields = {}
        blocks = cast("Generator[Block]", verb(*arguments, **options))

        # Close the generator even after an error: that removes a folder that the verb unpacked.
        with contextlib.closing(blocks):
            try:
                for block in blocks:
                    match block:
                        case ExitCode():
                            exit_code = max(exit_code, block.code)
                        case dict() as document:
                            pass  # printed once it is known whether the verb fails
                        case Record() if as_json:
                            print_json(block.value, indent=None if block.line else 1)
                        case str() if not as_json:
                            print_text = data if isinstance(block, Data) else say
                            print_text(block)
            except PatchkitError as error:
                error.document = document
                raise

        if document and as_json:
            print_json(document)
        if exit_code:
            raise SystemExit(exit_code)

    return wrapped


def lead_word(word: str, colour: str = "yellow") -> Shown:
    """Return the coloured word that a line begins with: ``beware``, ``silent``."""
    return style(word, fg=colour) + " "


def note(text: str) -> Shown:
    """Return the line of a note: worth knowing, but no fault."""
    return lead_word("note") + text


def fact_lines(facts: Mapping[str, object]) -> Sequence[LaidOut]:
    """Return a block of names and values; empty values are left out."""
    texts = {name: cell_text(value) for name, value in facts.items()}
    rows = [(dim(name), text) for name, text in texts.items() if text]
    return table(rows, indent="  ")


def section(title: str, rows: Iterable[Sequence[str]]) -> Lines:
    """Yield a title, rows below it, and an empty line."""
    yield bold(title)
    yield from table(rows, indent="  ")
    yield ""


def cell_text(value: object) -> str:
    """Return a value as text: a sequence with commas, nothing for None."""
    match value:
        case str():
            return value  # str() would lose that the text is ``Shown``
        case Mapping():
            return ", ".join(f"{name} {item}" for name, item in value.items())
        case list() | tuple():
            return ", ".join(map(str, value))
    return "" if value is None else str(value)


def dashed(*cells: str) -> Row:
    """Return cells with a dash for empty ones."""
    return tuple(cell or "-" for cell in cells)


def counted_noun(count: int, noun: str, plural: str = "") -> str:
    """Return ``1 file``, ``2 files``."""
    if count != 1:
        noun = plural or f"{noun}s"
    return f"{count:,} {noun}"


def count_loads(loads: Mapping[Load, int]) -> str:
    """Return ``33 family, 19 none``, best first."""
    return ", ".join(f"{loads[load]} {load}" for load in sorted(loads, reverse=True))


def gigabytes(size: float) -> str:
    """Return a number of bytes as ``1.5 GB``, ``2.0 MB`` or ``3.1 kB``."""
    for unit, bytes_per_unit in (("GB", 1e9), ("MB", 1e6)):
        if size >= bytes_per_unit / 10:
            return f"{size / bytes_per_unit:,.1f} {unit}"

    return f"{size / 1e3:,.1f} kB"


def finding_lines(
    findings: Sequence[Finding], *notes: Finding, verbose: bool
) -> Iterator[Shown]:
    """Yield errors, warnings and ``notes`` in full, then how many findings each level has.

    If ``verbose``, also yield all notes in full, and one line for each check. An unchecked GPU
    always has its line.
    """
    levels = {Level.ERROR, Level.WARNING}
    if verbose:
        levels.add(Level.NOTE)
    shown_whole = [row for row in findings if row.level in levels or row in notes]
    yield from finding_blocks(shown_whole, verbose=verbose)

    checks = findings if verbose else list(filter(_is_gpu_unchecked, findings))
    for level in (Level.UNKNOWN, Level.OK):
        for check in checks:
            if check.level is level and check not in notes:
                yield mark(level) + bold(check.where) + f"  {_subject(check)}"

    yield finding_summary(findings)


def finding_blocks(
    findings: Iterable[Finding], *, verbose: bool = False
) -> Iterator[Shown]:
    """Yield each finding in full; findings of the same level, place, reason and cure together."""
    groups: dict[Texts, list[Finding]] = {}
    for finding in findings:
        place = f"{finding.where}:{finding.line}" if finding.where else finding.what
        key = (finding.level, place, finding.why, finding.hint)
        groups.setdefault(key, []).append(finding)

    for group in groups.values():
        finding = group[0]
        yield from _group_lines(group)
        yield from _labelled_lines("why", finding.why)

        shows_evidence = verbose or finding.level is Level.ERROR
        if finding.sure and shows_evidence:
            evidence = (finding.sure, finding.source, finding.holds)
            yield dim(f"  sure:  {'; '.join(filter(None, evidence))}")

        yield from _labelled_lines("next", spelled(finding.hint))
        yield from _labelled_lines("costs", finding.costs)


def _group_lines(group: Sequence[Finding]) -> Iterator[Shown]:
    """Yield the place that findings share, then each finding; a single one on the same line."""
    finding = group[0]
    where = f"{finding.where}:{finding.line}" if finding.line else finding.where
    head = mark(finding.level) + bold(where)
    if len(group) == 1:
        gap = "  " if where else ""
        yield head + gap + _subject(finding)
        return

    yield head
    for finding in group:
        yield Shown("  ") + _subject(finding)


def _subject(finding: Finding) -> str:
    if not finding.about:
        return finding.what
    return f"{finding.about}: {finding.what}"


def _labelled_lines(name: str, text: str) -> Iterator[Shown]:
    label = f"{name}:"
    for line in text.split("\n"):
        if line:
            yield Shown("  ") + label.ljust(7) + line
            label = ""


def _is_gpu_unchecked(finding: Finding) -> bool:
    """Return whether the GPU was not checked, so that nothing can be called fine."""
    return finding.level is Level.UNKNOWN and finding.about == "gpu-throttled"


def finding_summary(findings: Sequence[Finding]) -> Shown:
    """Return one line: how many findings there are of each level."""
    counts = Counter(finding.level for finding in findings)
    parts = []
    for level in Level:
        if count := counts[level]:
            word = _COUNTED.get(level)
            parts.append(f"{count:,} {word}" if word else counted_noun(count, level))

    text = ", ".join(parts) or "nothing found"
    if counts.keys() & {Level.NOTE, Level.UNKNOWN}:
        text += "; -v shows all"

    sign = GOOD
    if counts.keys() & {Level.ERROR, Level.WARNING}:
        sign = BAD
    elif Level.OK not in counts or any(map(_is_gpu_unchecked, findings)):
        sign = UNSURE
    return sign + text
