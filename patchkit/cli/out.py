"""Print: everything that patchkit prints leaves here, with the next command to paste.

Text is escaped where a terminal would obey it, unless it is ``Shown``; data for programs goes out
byte for byte. Text for a terminal is laid out for its width: lines are broken at blanks alone, and
not where a command stands to be pasted: in backticks, or behind ``next:``. In a pipe nothing is
broken: a row is a line, for grep. patchkit may be in no PATH: a command is named as it was started.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
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
as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON for machines."
)


class Shown(str):
    """A text that is safe to print: what came from outside is escaped, styles are our own.

    ``+`` escapes a plain text that is added. An f-string makes a plain text of all its parts, so
    its styles are escaped as well, and seen at once.
    """

    __slots__ = ()

    def __add__(self, other: str) -> Shown:
        return Shown(str.__add__(self, shown(other)))

    def __radd__(self, other: str) -> Shown:
        return Shown(str.__add__(shown(other), self))


class LaidOut(Shown):
    """A text whose lines are made for the width already, or are not to be broken at all."""

    __slots__ = ()


_USUAL = 80  # of a terminal that does not say how wide it is
_LEAST = 40
_LEAST_PROSE = 28  # narrower, a wrapped column is a tower of single words
_GAP = "  "
_WHOLE = re.compile(r"`[^`\n]*`")
_PASTED = re.compile(r" *(next|undo)\b")
_NUMBER = re.compile(r"[\d.,]+|[-?]?")
_ERASE = Shown("\r\x1b[K")
_drawn = ""  # the line in the terminal that is going to be drawn again
_told_at = 0.0  # when something was last printed


def shown(text: str) -> Shown:
    """Return text escaped, if it is not yet."""
    return text if isinstance(text, Shown) else Shown(visible(text))


def style(text: str, **styles: Any) -> Shown:
    """Return text, escaped, with styles of ``click.style``: ``fg="red"``, ``bold=True``."""
    # Of nothing, the codes of a style would be left, behind which no blank is stripped.
    return Shown(click.style(shown(text), **styles)) if text else Shown("")


def say(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Print text for people: its lines broken at words, with colours, in a terminal only.

    NO_COLOR leaves colours out, FORCE_COLOR brings them into a pipe.
    """
    kept = shown(text)
    if not isinstance(text, LaidOut):
        width = columns(sys.stderr if err else sys.stdout)
        lines = (part for line in kept.split("\n") for part in wrap(line, width))
        kept = Shown("\n".join(lines))
    redraw_line("")
    click.echo(kept + Shown(end), nl=False, err=err, color=colour())
    _note_time()


def redraw_line(text: str) -> None:
    """Draw a line that the next one takes the place of, on standard error, a terminal."""
    global _drawn
    if text or _drawn:
        width = columns(sys.stderr) or 0
        click.echo(_ERASE + shown(text)[: width - 1], nl=False, err=True, color=True)
        _note_time()
    _drawn = text


def quiet_line() -> tuple[str, float]:
    """Return the line that is going to be drawn again, and for how long nothing was printed."""
    return _drawn, time.monotonic() - _told_at


def _note_time() -> None:
    global _told_at
    _told_at = time.monotonic()


def colour() -> bool | None:
    """Return whether to style what is printed; None leaves it to whether it is a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return True if os.environ.get("FORCE_COLOR") else None


def tell(line: str) -> None:
    """Print a line on standard error, where what a command answers does not go."""
    say(line, err=True)


def data(text: str) -> None:
    """Print what programs read, as UTF-8 and byte for byte; a terminal gets what is safe of it.

    Its lines are not broken: a command is copied from there, or JSON.
    """
    if sys.stdout.isatty():
        say(LaidOut(shown(text)), end="")
    else:
        # A file name that is not UTF-8 leaves as the bytes that it has.
        click.echo(text.encode("utf-8", "surrogateescape"), nl=False)


def print_json(value: object, *, indent: int | None = 1) -> None:
    """Print JSON, in which no character stands as itself that a terminal would obey.

    Without ``indent`` it is one line, at once: an event of several.
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=_json_value)
    if not text.replace("\n", "").isprintable():
        # Such characters are in strings alone, where JSON has an escape for each.
        safe = (
            c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text
        )
        text = "".join(safe)
    data(text + "\n")


def record_fields(record: Any, *left_out: str) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON has them, an empty text as null, and no class."""
    names = [
        field.name for field in dataclasses.fields(record) if field.name not in left_out
    ]
    values = {name: getattr(record, name) for name in names}
    return {
        name: None if value == "" else value
        for name, value in values.items()
        if not isinstance(value, type)
    }


def _json_value(value: Any) -> Any:
    """Return what JSON has no type for: records as objects, others as lists or texts."""
    if hasattr(value, "fields"):
        return {name: None if it == "" else it for name, it in value.fields().items()}
    if dataclasses.is_dataclass(value):
        return record_fields(value)
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    return list(value) if isinstance(value, Set | Iterator) else str(value)


def table(
    rows: Iterable[Sequence[str]], indent: str = "", *, heads: Sequence[str] = ()
) -> list[LaidOut]:
    """Return a text for each row, laid out for standard output; cells may be styled.

    Where there are ``heads``, the first text may be theirs.
    """
    # A name with a newline in it does not begin a line of its own.
    kept = [[shown(cell).replace("\n", "\\n") for cell in row] for row in rows]
    width = columns(sys.stdout)
    bold = [style(head, bold=True) for head in heads]
    return list(map(LaidOut, grid(kept, width, heads=bold, indent=indent)))


def prepare_streams() -> None:
    """Open the standard streams that the caller closed, and let output escape what it must.

    What is written to a closed standard output fails, as on a full disk; standard error is lost.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Else a file that is opened later would be what child processes write to.
            os.dup2(
                os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY),
                number,
            )
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def discard_output(number: int = 1) -> None:
    """Drop what could not be written: else Python fails once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def say_at_end(text: str) -> None:
    """Print why the run ends on standard error; if that fails, the exit code alone says it."""
    try:
        say(text, err=True)
    except OSError:
        discard_output(2)


@contextlib.contextmanager
def click_translated() -> Iterator[None]:
    """Escape what click's own errors quote; exit with 141 if the reader of the output has left."""
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
    # Some programs hand COLUMNS on to what they read: in a pipe it says nothing.
    if not stream.isatty():
        return None
    found = os.environ.get("COLUMNS", "")
    number = int(found) if found.isdecimal() else 0
    if not number:
        with contextlib.suppress(OSError, ValueError):
            number = os.get_terminal_size(stream.fileno()).columns
    return max(number, _LEAST) if number else _USUAL


def length(text: str) -> int:
    """Return the columns that a text fills: styles fill none, wide characters two."""
    bare = click.unstyle(text)
    if bare.isascii():
        return len(bare)
    return len(bare) + sum(
        unicodedata.east_asian_width(character) in "WF" for character in bare
    )


def wrap(text: str, width: int | None, hang: int = 2) -> list[str]:
    """Return a text as lines that fit; those after the first are indented by ``hang`` more."""
    if width is None or length(text) <= width:
        return [text.rstrip(" ")]
    bare = click.unstyle(text)
    if _PASTED.match(bare):
        return [text.rstrip(" ")]
    margin = " " * (len(bare) - len(bare.lstrip(" ")) + hang)
    # Commands in backticks are not broken. No text for a terminal holds a NUL: it is escaped.
    kept = _WHOLE.sub(lambda found: found[0].replace(" ", "\0"), text)
    first, *rest = (word.replace("\0", " ") for word in kept.split(" "))
    lines, line = [], first
    for word in rest:
        if length(line) + 1 + length(word) <= width or not click.unstyle(line).strip():
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
    whole = [*([heads] if heads else []), *rows]
    widths = [max(map(length, column)) for column in zip(*whole, strict=True)]
    numbers = [
        all(_NUMBER.fullmatch(click.unstyle(cell)) for cell in column)
        for column in zip(*rows, strict=True)
    ]
    before = len(indent) + sum(filled + len(_GAP) for filled in widths[:-1])
    room = None if width is None else max(width - before, _LEAST_PROSE)
    lines = []
    for row in whole:
        padded = [
            " " * (filled - length(cell)) + cell
            if number
            else cell + " " * (filled - length(cell))
            for cell, filled, number in zip(row, widths, numbers, strict=True)
        ]
        last = wrap(padded.pop().rstrip(" "), room, hang=0)
        start = indent + "".join(cell + _GAP for cell in padded)
        lines.append((start + ("\n" + " " * before).join(last)).rstrip(" "))
    return lines


_COMMAND = re.compile(rf"(?<![^\s(`])patchkit (?=(?:{'|'.join(VERBS)})\b)")


def next_step(*words: str | Path, where: str = "") -> LaidOut:
    """Return the line that names a command to paste; ``where``: on another machine, or in what."""
    return LaidOut(
        style(f"next{', ' if where else ''}{where}:", bold=True) + f" {quoted(*words)}"
    )


def program() -> list[str]:
    """Return how patchkit was started, as words: its path where PATH leads to none, or another."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py" and started.parent.name == "patchkit":
        return [_shortened(sys.executable), "-m", "patchkit"]
    has_path = started.name == "patchkit" and "/" in sys.argv[0]
    return [_shortened(sys.argv[0])] if has_path else ["patchkit"]


def error_text(error: PatchkitError) -> Shown:
    """Return what is said of an error."""
    said = PatchkitError(error.what, why=error.why, hint=spelled(error.hint))
    return style("error:", fg="red", bold=True) + f" {mask_secrets(str(said))}"


def spelled(text: str) -> str:
    """Return a text with the commands in it as patchkit was started."""
    return _COMMAND.sub(lambda _found: quoted(*program()) + " ", text)


def pip() -> list[str]:
    """Return the pip of the Python that runs this, as words.

    Debian and DGX OS refuse to install beside their own Python (PEP 668), so that the pip in PATH
    is of no use where patchkit has an environment.
    """
    beside = Path(sys.executable).with_name("pip")
    is_own = sys.prefix != sys.base_prefix and beside.exists()
    return [_shortened(str(beside))] if is_own else ["pip"]


def _shortened(path: str) -> str:
    """Return the name of a program that PATH leads to, else its path."""
    found = shutil.which(Path(path).name)
    return (
        Path(path).name
        if found and Path(found).absolute() == Path(path).absolute()
        else path
    )
