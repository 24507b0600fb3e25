"""Read systemd units: Environment= and the command lines, by systemd.exec(5)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from patchkit.runtime.files.collected import Collected
from patchkit.runtime.files.content import How
from patchkit.runtime.files.interpolation import interpolate
from patchkit.runtime.files.value import Piece, Value, known
from patchkit.runtime.shell.programs import Place
from patchkit.runtime.shell.script import FileReader, read_shell

_KEY = re.compile(r"\s*(?P<key>[A-Za-z]\w*)\s*=\s*")
_WORD = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|((?:\\.|[^\s"'\\])(?:\\.|[^\s\\])*))""")


def read_unit(text: str, found: Collected, files: FileReader | None = None) -> None:
    """Add what a unit says."""
    variables: dict[str, Value] = {}
    for key, value in _settings(text):
        if key in ("Environment", "DefaultEnvironment"):
            for word in _words(value):
                name, sign, _ = word.text.partition("=")
                if sign:
                    variables[name] = word.cut(len(name) + 1)
                    found.set(name, variables[name], word.line, How.UNIT)
        elif key == "PassEnvironment":
            for word in _words(value):
                found.pass_on(word.text, word.line, How.UNIT)
        elif key.startswith("Exec"):
            # The signs before the program say how it is started; `;` and | are no operators there,
            # but who writes them means a shell.
            count = len(value.text) - len(value.text.lstrip("@-:+!|"))
            command = value.cut(count)
            pieces = [
                inner
                for piece in command.pieces
                for inner in interpolate(piece.text, piece.line, variables.get).pieces
            ]
            read_shell(Value(tuple(pieces)), Place(line=value.line), found, files=files)


def _settings(text: str) -> Iterator[tuple[str, Value]]:
    """Yield keys and values; a backslash at the end of a line goes on below."""
    pieces: list[Piece] = []
    key = ""
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith(("#", ";")):
            continue
        stripped = line.rstrip()
        goes_on = stripped.endswith("\\")
        body = stripped.removesuffix("\\") if goes_on else stripped
        if not pieces:
            match = _KEY.match(body)
            if match is None:
                continue
            key, body = match["key"], body[match.end() :]
        pieces.append(Piece(f"{body} " if goes_on else body, number))
        if not goes_on:
            yield key, Value(tuple(pieces))
            pieces = []
    if pieces:
        yield key, Value(tuple(pieces))


def _words(value: Value) -> Iterator[Value]:
    """Yield the words of Environment=, without quotes."""
    for piece in value.pieces:
        for double, single, bare in _WORD.findall(piece.text):
            yield known(re.sub(r"\\(.)", r"\1", double or bare) or single, piece.line)
