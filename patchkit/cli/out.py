"""Print: everything that patchkit prints leaves here, with the next command to paste.

Text is escaped where a terminal would obey it, unless it is ``Shown``; data for programs goes out
byte for byte. In a terminal, text is laid out for its width: lines break at blanks only, and never
inside a command to paste, which stands in backticks or behind ``next:``. In a pipe no line is
broken: a row is a line, for grep. patchkit may be in no PATH: commands name it as it was started.
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
import time
import unicodedata
from collections.abc import (
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
from patchkit.quoting import quoted, visible
from patchkit.runtime.rules.secret_texts import mask_secrets

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
_printed_at = time.monotonic()  # when something was last printed


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
    _note_time()


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
        _note_time()
    _drawn_line = text


def quiet_line() -> tuple[str, float]:
    """Return the line that will be drawn again, and the seconds since the last output."""
    return _drawn_line, time.monotonic() - _printed_at


def _note_time() -> None:
    global _printed_at
    _printed_at = time.monotonic()


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
