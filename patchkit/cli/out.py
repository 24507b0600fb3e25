"""Print text and data: nothing else in patchkit prints.

Control characters in text are escaped unless the text is ``Shown``; data for programs is printed
byte for byte. In a terminal, lines are wrapped to its width: at blanks only, and never inside a
command to paste, which stands in backticks or behind ``next:``. In a pipe no line is wrapped, so
that each row is one line for grep. Commands name patchkit as it was started: PATH may lack it.

Long work shows its progress on standard error: in a redrawn line, or in lines now and then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from pathlib import Path
from typing import IO, Any

import click

from patchkit.cli.verbs import VERBS
from patchkit.errors import PatchkitError
from patchkit.frozen import Fields, plain_fields
from patchkit.quoting import quoted, visible
from patchkit.records import RECIPES_VARIABLE
from patchkit.runtime.rules.secret_texts import mask_secrets


class Shown(str):
    """A text that is safe to print: foreign text in it is escaped, and its styles are patchkit's.

    ``+`` escapes a plain text that is added. An f-string returns a plain text even if a part is
    ``Shown``: printing escapes its styles, which makes the mistake visible.
    """

    __slots__ = ()

    def __add__(self, other: str) -> Shown:
        return Shown(str.__add__(self, shown(other)))

    def __radd__(self, other: str) -> Shown:
        return Shown(str.__add__(shown(other), self))


class LaidOut(Shown):
    """A text that is printed without wrapping: its lines fit already, or must stay whole."""

    __slots__ = ()


_LEAST_WIDTH = 40
_LEAST_PROSE = 28  # columns: a narrower column would have single words as lines
_GAP = "  "
_BACKTICKED = re.compile(r"`[^`\n]*`")
_PASTED = re.compile(r" *(next|undo)\b")
_NUMBER = re.compile(r"[\d.,]+|[-?]?")
_ERASE = Shown("\r\x1b[K")
_drawn_line = ""  # the line of progress that the terminal shows now
_printed_at = time.monotonic()  # when something was last printed


def shown(text: str) -> Shown:
    """Return a text escaped; a ``Shown`` one as it is."""
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
    """Print text for people. Wrap and colour it in a terminal alone.

    The variable NO_COLOR turns colours off everywhere, FORCE_COLOR turns them on in a pipe.
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
    _print(safe + Shown(end), err=err)
    _note_time()


def _print(text: str | bytes, *, err: bool = False) -> None:
    """Print a text as it is; an OSError then names the output, since it has no file name."""
    try:
        click.echo(text, nl=False, err=err, color=colour())
    except OSError as error:
        error.filename = "standard output"
        raise


def redraw_line(text: str) -> None:
    """Replace the line of progress in the terminal of standard error; "" removes it."""
    global _drawn_line
    if text or _drawn_line:
        width = columns(sys.stderr) or 0
        click.echo(_ERASE + shown(text)[: width - 1], nl=False, err=True, color=True)
        _note_time()
    _drawn_line = text


def _note_time() -> None:
    global _printed_at
    _printed_at = time.monotonic()


def colour() -> bool | None:
    """Return whether the environment turns styles on or off; None: only a terminal gets them."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return None


def tell(line: str) -> None:
    """Print a line for people on standard error, so that the command's output stays clean."""
    say(line, err=True)


def data(text: str) -> None:
    """Print data for programs as UTF-8, byte for byte, but escaped in a terminal.

    Lines are not wrapped, since people copy commands and JSON from the terminal.
    """
    if sys.stdout.isatty():
        say(LaidOut(shown(text)), end="")
    else:
        # A file name that is not UTF-8 is printed as its original bytes.
        _print(text.encode("utf-8", "surrogateescape"))


def print_json(value: object, *, indent: int | None = 1) -> None:
    """Print a value as JSON, in ASCII; control characters are escaped.

    If ``indent`` is None, print one line, as for an event.
    """
    text = json.dumps(value, indent=indent, default=_json_value)
    # The only control character that JSON may have in a string.
    data(text.replace("\x7f", r"\u007f") + "\n")


def record_fields(record: Any, *left_out: str) -> Fields:
    """Return the fields of a dataclass for JSON, without ``left_out`` and classes; "" as None."""
    return {
        name: _json_text(value)
        for name, value in plain_fields(record).items()
        if name not in left_out
    }


def _json_text(value: Any) -> Any:
    return None if value == "" else value


def _json_value(value: Any) -> Any:
    """Return a value in a type of JSON: an object for a record or mapping, a list, or a text."""
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

    ``heads`` become the first row, unless there are no rows.
    """
    # A newline inside a name must not begin a row.
    cells = [[shown(cell).replace("\n", "\\n") for cell in row] for row in rows]
    texts = grid(
        cells,
        columns(sys.stdout),
        heads=list(map(bold, heads)),
        indent=indent,
    )
    return list(map(LaidOut, texts))


def prepare_streams() -> None:
    """Open standard streams that are closed, and escape characters that an encoding lacks.

    Writing to a standard output that was closed fails, as on a full disk. What is written to a
    standard error that was closed is lost.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _open_stream(number, name)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _open_stream(number: int, name: str) -> None:
    # The next opened file would get the free descriptor, and child processes would write into it.
    access = os.O_WRONLY if name == "stderr" else os.O_RDONLY
    os.dup2(os.open(os.devnull, access), number)
    os.set_inheritable(number, True)
    setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def discard_output(number: int = 1) -> None:
    """Drop output that could not be written: Python would fail on it again when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def say_at_end(text: str) -> None:
    """Print on standard error why the run ends. If that fails, the exit code has to suffice."""
    try:
        say(text, err=True)
    except OSError:
        discard_output(2)


@contextlib.contextmanager
def exit_on_closed_pipe() -> Iterator[None]:
    """Exit with 141 if the reader of the output has closed it."""
    try:
        yield
    except BrokenPipeError:  # click would exit with 1, which stands for a bug
        discard_output()
        sys.exit(128 + signal.SIGPIPE)


def columns(stream: IO[Any]) -> int | None:
    """Return how many columns a line may fill in a terminal (COLUMNS overrides); None in a pipe."""
    # In a pipe COLUMNS means nothing: some programs only pass it on to their pager.
    if not stream.isatty():
        return None

    return max(shutil.get_terminal_size().columns, _LEAST_WIDTH)


def length(text: str) -> int:
    """Return the columns that a text fills: styles fill none."""
    return len(click.unstyle(text))


def wrap(text: str, width: int | None, hang: int = 2) -> list[str]:
    """Return a text as lines of at most ``width`` columns; indent all but the first by ``hang``."""
    bare = click.unstyle(text)
    if width is None or length(text) <= width or _PASTED.match(bare):
        return [text.rstrip(" ")]

    indent = len(bare) - len(bare.lstrip(" "))
    margin = " " * (indent + hang)
    # Put NUL for blanks in commands, which must stay whole. A NUL in the text is escaped already.
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
    """Return a text of one or more lines for each row, first for the heads.

    Columns are aligned, columns of numbers to the right. If a row is too wide, its last column is
    wrapped, or all but the first if that leaves too little room for words.
    """
    if not rows:
        return []

    whole = [heads, *rows] if heads else rows
    widths = [max(map(length, column)) for column in zip(*whole, strict=True)]
    are_numbers = list(map(_are_numbers, zip(*rows, strict=True)))

    limit = (width or sys.maxsize) - len(indent)
    words = [word for row in whole for word in row[-1].split()]
    needed = max([_LEAST_PROSE, *map(length, words)])
    kept = len(widths) - 1
    if limit - _margin(widths[:kept]) < needed:
        kept = min(1, kept)
    margin = _margin(widths[:kept])
    room = max(limit - margin, _LEAST_PROSE)

    lines = []
    for row in whole:
        cells = list(map(_padded, row, widths, are_numbers))
        start = indent + "".join(cell + _GAP for cell in cells[:kept])
        rest = _GAP.join(cell.rstrip(" ") for cell in cells[kept:]).rstrip(" ")
        blanks = len(rest) - len(rest.lstrip(" "))  # before a number
        wrapped = wrap(rest, room, hang=-blanks)
        continued = ("\n" + indent + " " * margin).join(wrapped)
        lines.append((start + continued).rstrip(" "))

    return lines


def _margin(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * len(widths)


def _are_numbers(column: Sequence[str]) -> bool:
    return all(_NUMBER.fullmatch(click.unstyle(cell)) for cell in column)


def _padded(cell: str, filled: int, to_the_right: bool) -> str:
    blanks = " " * (filled - length(cell))
    if to_the_right:
        return blanks + cell
    return cell + blanks


_CUT = re.compile(r"(.{1000}).+")  # a line that quotes a huge argument
_COMMAND = re.compile(rf"(?<![^\s(`])patchkit (?=(?:{'|'.join(VERBS)})\b)")


def next_step(*words: str | Path, where: str = "") -> LaidOut:
    """Return the line ``next: COMMAND``; ``where`` adds on which machine, or why, to run it."""
    head = f"next, {where}:" if where else "next:"
    return LaidOut(bold(head) + f" {quoted(*words)}")


def next_verb(*words: str | Path, where: str = "") -> LaidOut:
    """Return the line ``next: COMMAND`` for a command of patchkit, named as it was started."""
    return next_step(*program(), *words, where=where)


def next_hint(hint: str) -> Shown:
    """Return the line with the hint of an error or a finding, which says what to do next."""
    return bold("next:") + f" {spelled(hint)}"


def program() -> list[str]:
    """Return the words that start patchkit: a path if PATH leads to no or another patchkit.

    Folders of recipes follow: another shell may not have the variable that names them.
    """
    started = Path(sys.argv[0])
    words = ["patchkit"]
    if started.name == "__main__.py" and started.parent.name == "patchkit":
        words = [_shortened(sys.executable), "-m", "patchkit"]
    elif started.name == "patchkit" and "/" in sys.argv[0]:
        words = [_shortened(sys.argv[0])]

    if folders := os.environ.get(RECIPES_VARIABLE):
        words += ["--recipes", folders]
    return words


def error_text(error: PatchkitError) -> Shown:
    """Return an error as people read it, without secrets."""
    what = _CUT.sub(r"\1…", error.what)
    text = str(PatchkitError(what, why=error.why, hint=spelled(error.hint)))
    return style("error:", fg="red", bold=True) + f" {mask_secrets(text)}"


def spelled(text: str) -> str:
    """Return a text in which each command names patchkit as it was started."""
    return _COMMAND.sub(lambda _command: quoted(*program()) + " ", text)


def pip() -> list[str]:
    """Return the words that start pip: that of the running virtual environment if there is one.

    The pip in PATH may belong to the system's Python, for which Debian and DGX OS refuse to install
    anything (PEP 668).
    """
    own_pip = Path(sys.executable).with_name("pip")

    if sys.prefix != sys.base_prefix and own_pip.exists():
        return [_shortened(str(own_pip))]
    return ["pip"]


def _shortened(path: str) -> str:
    """Return a program's name if PATH leads to its path, otherwise the path."""
    name = Path(path).name
    in_path = shutil.which(name)
    if in_path and Path(in_path).absolute() == Path(path).absolute():
        return name
    return path


# Seconds between two lines in a pipe; a hundredth of the elapsed time if that is more.
PERIOD = 3.0
_LONG = 90.0  # seconds: a line tells the time that is left if it is more
_ENOUGH_FOR_RATE = 0.01  # share of the total that must be done to estimate the rest
_REDRAWN = 0.1  # seconds between two drawings of a terminal's line
_QUIET = 2.0  # seconds without output, after which a terminal's line shows the time

Update = Callable[[int, int], None]
"""A callback that gets the amount done and the total: bytes, or whatever the caller counts."""


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

    with _beating(printing) if in_terminal else contextlib.nullcontext():
        try:
            yield report
        finally:
            redraw_line("")


def _amount(done: int, total: int, counted: str) -> str:
    if counted:
        return f"{done} of {total} {counted}"
    return f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"


def _time_left(done: int, total: int, elapsed: float) -> str:
    """Return a text with the minutes left; "" for a short time, or if it is too early to tell."""
    if done < total * _ENOUGH_FOR_RATE:
        return ""
    seconds = elapsed * (total - done) / done
    return f", about {seconds / 60:.0f} min left" if seconds > _LONG else ""


@contextlib.contextmanager
def _beating(printing: threading.Lock) -> Iterator[None]:
    """Redraw the terminal's line with the elapsed time whenever nothing was printed for a while."""
    ended = threading.Event()
    began = time.monotonic()

    def beat() -> None:
        line = ""
        while not ended.wait(_QUIET / 2):
            # The drawn line may be the one of the last beat: then do not add a second time to it.
            task = line if _drawn_line.startswith(f"{line}, ") else _drawn_line
            if time.monotonic() - _printed_at >= _QUIET:
                line = task or "at work"
                with printing:
                    redraw_line(f"{line}, {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
