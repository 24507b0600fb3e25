"""Print: everything that patchkit prints leaves here, with the next command to paste.

A verb below ``@rendered`` yields blocks: with --json only each ``Record`` is printed, without it
everything else: lines, findings, tables, and ``Data`` for programs. ``ExitCode`` sets the code that
the verb ends with.

Text is escaped where a terminal would obey it, unless it is ``Shown``; data for programs goes out
byte for byte. In a terminal, text is laid out for its width: lines break at blanks only, and never
inside a command to paste, which stands in backticks or behind ``next:``. In a pipe no line is
broken: a row is a line, for grep. patchkit may be in no PATH: commands name it as it was started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import io
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import click

from patchkit.cli.verbs import VERBS
from patchkit.errors import PatchkitError, UsageError
from patchkit.finding import Finding, Level
from patchkit.quoting import quoted, visible
from patchkit.runtime.rules.secret_texts import mask_secrets
from patchkit.target import Load

PATH = click.Path(path_type=Path)
PRESENT_PATH = click.Path(path_type=Path, exists=True)
FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
FILE_OR_DASH = click.Path(path_type=Path, allow_dash=True)


class Shown(str):
    """A text that is safe to print: text from outside is escaped, styles are patchkit's.

    ``+`` escapes a plain text that is added. An f-string makes a plain text of all its parts, so
    its styles are escaped as well, and seen at once.
    """

    __slots__ = ()

    def __add__(self, other: str) -> Shown:
        return Shown(str.__add__(self, shown(other)))

    def __radd__(self, other: str) -> Shown:
        return Shown(str.__add__(shown(other), self))


class LaidOut(Shown):
    """A text whose lines fit the width already, or must not be broken."""

    __slots__ = ()


_USUAL_WIDTH = 80  # of a terminal that does not say how wide it is
_LEAST_WIDTH = 40
_LEAST_PROSE = 28  # narrower, a wrapped column is a tower of single words
_GAP = "  "
_BACKTICKED = re.compile(r"`[^`\n]*`")
_PASTED = re.compile(r" *(next|undo)\b")
_NUMBER = re.compile(r"[\d.,]+|[-?]?")
_ERASE = Shown("\r\x1b[K")
_drawn_line = ""  # the line in the terminal that will be drawn again


def shown(text: str) -> Shown:
    """Return text escaped, if it is not yet."""
    if isinstance(text, Shown):
        return text
    return Shown(visible(text))


def style(text: str, **styles: Any) -> Shown:
    """Return text, escaped, with styles of ``click.style``: ``fg="red"``, ``bold=True``."""
    if not text:  # a styled empty text is not empty: it holds the codes of the style
        return Shown("")

    styled = click.style(shown(text), **styles)
    return Shown(styled)


def bold(text: str) -> Shown:
    """Return text, escaped, in bold type."""
    return style(text, bold=True)


def dim(text: str) -> Shown:
    """Return text, escaped, in a faint colour."""
    return style(text, dim=True)


def say(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Print text for people; only in a terminal are its lines broken, and coloured.

    NO_COLOR leaves colours out, FORCE_COLOR brings them into a pipe.
    """
    safe = shown(text)
    if not isinstance(text, LaidOut):
        stream = sys.stderr if err else sys.stdout
        width = columns(stream)
        lines = []
        for line in safe.split("\n"):
            lines += wrap(line, width)
        safe = Shown("\n".join(lines))

    redraw_line("")
    click.echo(
        safe + Shown(end),
        nl=False,
        err=err,
        color=colour(),
    )


def redraw_line(text: str) -> None:
    """Draw a line that the next one replaces, on standard error, a terminal."""
    global _drawn_line
    if text or _drawn_line:
        width = columns(sys.stderr) or 0
        click.echo(
            _ERASE + shown(text)[: width - 1],
            nl=False,
            err=True,
            color=True,
        )
        _drawn_line = text


def colour() -> bool | None:
    """Return whether to print styles; None leaves them to a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return None


def tell(line: str) -> None:
    """Print a line on standard error, beside the output of a command."""
    say(line, err=True)


def data(text: str) -> None:
    """Print data for programs, as UTF-8 and byte for byte; a terminal gets it escaped.

    Lines are not broken: people copy commands and JSON from there.
    """
    if sys.stdout.isatty():
        say(LaidOut(shown(text)), end="")
    else:
        # A file name that is not UTF-8 leaves as the bytes that it has.
        click.echo(text.encode("utf-8", "surrogateescape"), nl=False)


def print_json(value: object, *, indent: int | None = 1) -> None:
    """Print JSON; every character that a terminal would obey is escaped.

    Without ``indent`` it is one line, as for an event.
    """
    text = json.dumps(
        value,
        indent=indent,
        ensure_ascii=False,
        default=_json_value,
    )
    if not text.replace("\n", "").isprintable():
        # Such characters stand only in strings, where JSON has an escape for each.
        text = "".join(map(_json_escaped, text))
    data(text + "\n")


def _json_escaped(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    return json.dumps(character)[1:-1]


def record_fields(record: Any, *left_out: str) -> dict[str, Any]:
    """Return a dataclass as JSON has it: empty texts are null, and classes are left out."""
    fields = {}
    for field in dataclasses.fields(record):
        if field.name in left_out:
            continue

        value = getattr(record, field.name)
        if not isinstance(value, type):
            fields[field.name] = _json_text(value)

    return fields


def _json_text(value: Any) -> Any:
    return None if value == "" else value


def _json_value(value: Any) -> Any:
    """Return a value that JSON has a type for: records as objects, others as lists or texts."""
    if hasattr(value, "fields"):
        fields = value.fields()
        return {name: _json_text(field) for name, field in fields.items()}

    if dataclasses.is_dataclass(value):
        return record_fields(value)

    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, Set | Iterator):
        return list(value)
    return str(value)


def table(
    rows: Iterable[Sequence[str]], indent: str = "", *, heads: Sequence[str] = ()
) -> list[LaidOut]:
    """Return a text for each row, laid out for standard output; cells may be styled.

    ``heads`` are the first row, unless there are no others.
    """
    # A name with a newline in it does not begin a line of its own.
    cells = [[shown(cell).replace("\n", "\\n") for cell in row] for row in rows]
    texts = grid(
        cells,
        columns(sys.stdout),
        heads=list(map(bold, heads)),
        indent=indent,
    )
    return list(map(LaidOut, texts))


def prepare_streams() -> None:
    """Open standard streams that are closed; escape what the encoding of output lacks.

    Writing to a closed standard output fails, as on a full disk; standard error is lost.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _open_stream(number, name)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _open_stream(number: int, name: str) -> None:
    # A free number would go to the next file that is opened, and child processes would write to it.
    access = os.O_WRONLY if name == "stderr" else os.O_RDONLY
    os.dup2(os.open(os.devnull, access), number)
    os.set_inheritable(number, True)
    setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def discard_output(number: int = 1) -> None:
    """Drop output that could not be written; otherwise Python fails once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def say_at_end(text: str) -> None:
    """Print why the run ends on standard error; if that fails, only the exit code tells it."""
    try:
        say(text, err=True)
    except OSError:
        discard_output(2)


@contextlib.contextmanager
def click_translated() -> Iterator[None]:
    """Escape words that click's errors quote; exit with 141 if the reader of the output left."""
    try:
        yield
    except click.ClickException as error:
        error.message = visible(error.message)  # type: ignore[misc]  # final, says click
        raise
    except BrokenPipeError:  # click would exit with 1, which stands for a bug
        discard_output()
        sys.exit(128 + signal.SIGPIPE)


def columns(stream: IO[Any]) -> int | None:
    """Return how many columns a line may fill in a terminal (COLUMNS overrides); None in a pipe."""
    # Some programs hand COLUMNS on to their pager: in a pipe it means nothing.
    if not stream.isatty():
        return None

    number = 0
    setting = os.environ.get("COLUMNS", "")
    with contextlib.suppress(OSError, ValueError):
        number = int(setting if setting.isdecimal() else 0)
        number = number or os.get_terminal_size(stream.fileno()).columns
    return max(number or _USUAL_WIDTH, _LEAST_WIDTH)


def length(text: str) -> int:
    """Return the columns that a text fills: styles fill none, wide characters two."""
    bare = click.unstyle(text)
    if bare.isascii():
        return len(bare)

    widths = map(unicodedata.east_asian_width, bare)
    wide = [width for width in widths if width in "WF"]
    return len(bare) + len(wide)


def wrap(text: str, width: int | None, hang: int = 2) -> list[str]:
    """Return a text as lines that fit; all but the first are indented by ``hang`` more."""
    bare = click.unstyle(text)
    if width is None or length(text) <= width or _PASTED.match(bare):
        return [text.rstrip(" ")]

    indent = len(bare) - len(bare.lstrip(" "))
    margin = " " * (indent + hang)
    # Commands in backticks are not broken. No text for a terminal holds a NUL: it is escaped.
    joined = _BACKTICKED.sub(lambda command: command[0].replace(" ", "\0"), text)
    line, *words = [word.replace("\0", " ") for word in joined.split(" ")]

    lines = []
    for word in words:
        is_blank = not click.unstyle(line).strip()
        if is_blank or length(line) + 1 + length(word) <= width:
            line += f" {word}"
        elif word:
            lines.append(line.rstrip(" "))
            line = margin + word

    return [*lines, line.rstrip(" ")]


def grid(
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    heads: Sequence[str] = (),
    indent: str = "",
) -> list[str]:
    """Return a text for each row, of one line or more; the heads come first.

    Columns are aligned, those of numbers to the right; the last one is wrapped where it has to be.
    """
    if not rows:
        return []

    whole = [heads, *rows] if heads else rows
    widths = [max(map(length, column)) for column in zip(*whole, strict=True)]
    are_numbers = list(map(_are_numbers, zip(*rows, strict=True)))

    gaps = len(_GAP) * (len(widths) - 1)
    margin = len(indent) + sum(widths[:-1]) + gaps
    room = None
    if width is not None:
        room = max(width - margin, _LEAST_PROSE)

    lines = []
    for row in whole:
        cells = list(map(_padded, row, widths, are_numbers))
        wrapped = wrap(cells.pop().rstrip(" "), room, hang=0)
        start = indent + "".join(cell + _GAP for cell in cells)
        continued = ("\n" + " " * margin).join(wrapped)
        lines.append((start + continued).rstrip(" "))

    return lines


def _are_numbers(column: Sequence[str]) -> bool:
    return all(_NUMBER.fullmatch(click.unstyle(cell)) for cell in column)


def _padded(cell: str, filled: int, to_the_right: bool) -> str:
    blanks = " " * (filled - length(cell))
    if to_the_right:
        return blanks + cell
    return cell + blanks


_COMMAND = re.compile(rf"(?<![^\s(`])patchkit (?=(?:{'|'.join(VERBS)})\b)")


def next_step(*words: str | Path, where: str = "") -> LaidOut:
    """Return the line with a command to paste; ``where`` names another machine, or the reason."""
    head = f"next, {where}:" if where else "next:"
    return LaidOut(bold(head) + f" {quoted(*words)}")


def next_verb(*words: str | Path, where: str = "") -> LaidOut:
    """Return the line with a command of patchkit to paste, as patchkit was started."""
    return next_step(*program(), *words, where=where)


def next_hint(hint: str) -> Shown:
    """Return the line with the cure of an error or a finding."""
    return bold("next:") + f" {spelled(hint)}"


def program() -> list[str]:
    """Return how patchkit was started, as words: its path where PATH leads to none, or another."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py" and started.parent.name == "patchkit":
        return [_shortened(sys.executable), "-m", "patchkit"]

    if started.name == "patchkit" and "/" in sys.argv[0]:
        return [_shortened(sys.argv[0])]
    return ["patchkit"]


def error_text(error: PatchkitError) -> Shown:
    """Return an error as people read it, without secrets."""
    text = str(PatchkitError(error.what, why=error.why, hint=spelled(error.hint)))
    return style("error:", fg="red", bold=True) + f" {mask_secrets(text)}"


def spelled(text: str) -> str:
    """Return a text with the commands in it as patchkit was started."""
    return _COMMAND.sub(lambda _command: quoted(*program()) + " ", text)


def pip() -> list[str]:
    """Return the pip of the Python that runs this, as words.

    Debian and DGX OS refuse to install beside their own Python (PEP 668), so that the pip in PATH
    is of no use where patchkit has an environment.
    """
    own_pip = Path(sys.executable).with_name("pip")

    if sys.prefix != sys.base_prefix and own_pip.exists():
        return [_shortened(str(own_pip))]
    return ["pip"]


def _shortened(path: str) -> str:
    """Return the name of a program that PATH leads to, otherwise its path."""
    name = Path(path).name
    in_path = shutil.which(name)
    if in_path and Path(in_path).absolute() == Path(path).absolute():
        return name
    return path


# Blocks: what a verb yields


Verb = Callable[..., Any]
Option = Callable[[Any], Any]
Row = tuple[str, ...]
Lines = Iterator[str]
Fields = dict[str, Any]


def option(*words: str, **settings: Any) -> Option:
    """Return an option: its names, one with its metavar as in ``--jobs N``, then its help."""
    *declarations, text = words
    names = []
    for declaration in declarations:
        name, _, metavar = declaration.partition(" ")
        names.append(name)
        if metavar:
            settings["metavar"] = metavar
    return click.option(*names, help=text, **settings)


def flag(*words: str) -> Option:
    """Return an option without a value; the last word is its help."""
    return option(*words, is_flag=True)


as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON for machines."
)
verbose_option = flag("-v", "--verbose", "Show all of it.")
dry_run_option = flag("--dry-run", "Only say what would be done.")
house_option = option(
    "--dir",
    "house",
    "Folder of wheels.",
    type=PATH,
    default="wheelhouse",
    show_default=True,
)

LOAD_STYLES: Mapping[Load, Mapping[str, Any]] = {
    Load.EXACT: {"fg": "green"},
    Load.FAMILY: {"fg": "green"},
    Load.COMPATIBLE: {"fg": "cyan"},
    Load.JIT: {"fg": "yellow"},
    Load.NONE: {"dim": True},
}
# Sign and style of each level.
MARKS: Mapping[Level, tuple[str, Mapping[str, Any]]] = {
    Level.ERROR: ("✗", {"fg": "red", "bold": True}),
    Level.WARNING: ("!", {"fg": "yellow"}),
    Level.NOTE: ("-", {"dim": True}),
    Level.UNKNOWN: ("?", {"fg": "cyan"}),
    Level.OK: ("✓", {"fg": "green"}),
}
_WHOLE = 1000  # characters: click cuts the help of a command to the width
# Levels that a summary does not count by their names.
_COUNTED = {Level.UNKNOWN: "not checked", Level.OK: "fine"}


def mark(level: Level) -> Shown:
    """Return the sign that the line of a finding begins with."""
    sign, styles = MARKS[level]
    return style(sign, **styles) + " "


GOOD = mark(Level.OK)
BAD = mark(Level.ERROR)
UNSURE = mark(Level.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Record:
    """A value for --json; ``line`` prints it as one line, as for an event."""

    value: object
    line: bool = False


@dataclass(frozen=True, slots=True)
class Data:
    """Text for programs, without --json: printed byte for byte."""

    text: str


@dataclass(frozen=True, slots=True)
class ExitCode:
    """The code that a verb ends with; the highest of several counts."""

    code: int


Block = str | Record | Data | ExitCode
Blocks = Iterator[Block]


class VerbGroup(click.Group):
    """A verb with commands; its help shows the whole first sentence of each."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, *words = args
        names = self.list_commands(ctx)
        if name in names or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)

        verb = str(ctx.info_name)
        similar = difflib.get_close_matches(name, names, n=1)
        completed = [*similar, *words] if similar else ["--help"]
        raise UsageError(
            f"`patchkit {verb}` has no command {name!r}; it has {', '.join(names)}",
            hint=quoted("patchkit", verb, *completed),
        )

    def format_commands(  # click's signature
        self,
        ctx: click.Context,  # noqa: ARG002
        formatter: click.HelpFormatter,
    ) -> None:
        rows = []
        for name, command in sorted(self.commands.items()):
            rows.append((name, command.get_short_help_str(_WHOLE)))

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

    @as_json
    @functools.wraps(verb)
    def wrapped(*arguments: Any, as_json: bool, **options: Any) -> None:
        exit_code = 0
        blocks = cast("Generator[Block]", verb(*arguments, **options))

        # Closed even after an error: a folder that the verb unpacked is removed then.
        with contextlib.closing(blocks):
            for block in blocks:
                if isinstance(block, ExitCode):
                    exit_code = max(exit_code, block.code)
                else:
                    _print_block(block, as_json=as_json)

        if exit_code:
            raise SystemExit(exit_code)

    return wrapped


def _print_block(block: str | Record | Data, *, as_json: bool) -> None:
    is_record = isinstance(block, Record)
    if is_record != as_json:
        return

    match block:
        case Record():
            indent = None if block.line else 1
            print_json(block.value, indent=indent)
        case Data():
            data(block.text)
        case _:
            say(block)


def lead_word(word: str, colour: str = "yellow") -> Shown:
    """Return the coloured word that a line begins with: ``beware``, ``silent``."""
    return style(word, fg=colour) + " "


def note(text: str) -> Shown:
    """Return a line that is worth knowing, and no fault."""
    return lead_word("note") + text


def fact_lines(facts: Mapping[str, object]) -> Sequence[LaidOut]:
    """Return a block of names and values; empty values are left out."""
    rows = []
    for name, value in facts.items():
        if text := cell_text(value):
            rows.append((dim(name), text))

    return table(rows, indent="  ")


def cell_text(value: object) -> str:
    """Return a value as text: a sequence with commas, nothing for None."""
    match value:
        case str():
            return value  # a styled text stays one
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


def finding_lines(findings: Sequence[Finding], *, verbose: bool) -> Iterator[Shown]:
    """Yield errors and warnings whole, then how many other findings there are; or all of them."""
    levels = {Level.ERROR, Level.WARNING}
    if verbose:
        levels.add(Level.NOTE)
    shown_whole = [finding for finding in findings if finding.level in levels]
    yield from finding_blocks(shown_whole, verbose=verbose)

    checks = findings if verbose else list(filter(_is_gpu_unchecked, findings))
    for level in (Level.UNKNOWN, Level.OK):
        for check in checks:
            if check.level is level:
                yield mark(level) + bold(check.where) + f"  {_subject(check)}"

    yield finding_summary(findings)


def finding_blocks(
    findings: Iterable[Finding], *, verbose: bool = False
) -> Iterator[Shown]:
    """Yield each finding whole; those of the same place, reason and cure are one."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
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
    """Yield the place of findings, then each of them."""
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


# How far long work is: a line that is redrawn, or one now and then

PERIOD = 3.0  # seconds from one line of a pipe to the next, or a hundredth of the time so far
_LONG = 90.0  # seconds that are left: a line names them from then on
_ENOUGH_FOR_RATE = 0.01  # of the total: before that the first bytes are no rate
_REDRAWN = 0.1  # seconds from one state of a terminal's line to the next

Update = Callable[[int, int], None]
"""Takes the amount that is done, and the total: bytes, or the things that a caller counts."""


@contextlib.contextmanager
def progress(
    counted: str = "", clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str], Update]]:
    """Show how much of a task is done, in bytes, or in the things that ``counted`` names."""
    in_terminal = sys.stderr.isatty()
    printing = threading.Lock()  # nodes report side by side

    def report(task: str) -> Update:
        began: float | None = None
        due = 0.0
        if in_terminal:
            with printing:
                redraw_line(task)  # some tasks never report more than that

        def update(done: int, total: int) -> None:
            nonlocal began, due
            now = clock()
            if began is None:
                began = now
                due = now if in_terminal else now + PERIOD
            if done >= total:
                redraw_line("")
            elif now >= due:
                elapsed = now - began
                due = now + (_REDRAWN if in_terminal else max(PERIOD, elapsed / 100))
                line = f"{task}: {_amount(done, total, counted)}"
                with printing:
                    show = redraw_line if in_terminal else tell
                    show(line + _time_left(done, total, elapsed))

        return update

    try:
        yield report
    finally:
        redraw_line("")


def _amount(done: int, total: int, counted: str) -> str:
    if counted:
        return f"{done} of {total} {counted}"
    return f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"


def _time_left(done: int, total: int, elapsed: float) -> str:
    """Return how long the rest takes; "" if that is short, or cannot be told yet."""
    if done < total * _ENOUGH_FOR_RATE:
        return ""
    seconds = elapsed * (total - done) / done
    return f", about {seconds / 60:.0f} min left" if seconds > _LONG else ""
