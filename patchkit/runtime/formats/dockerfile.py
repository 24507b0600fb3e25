"""Read Dockerfiles: ENV is environment, ARG is not, and RUN, CMD and ENTRYPOINT are commands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from patchkit.runtime.files.collected import Collected
from patchkit.runtime.files.content import How
from patchkit.runtime.files.interpolation import interpolate
from patchkit.runtime.files.value import Piece, Value, joined, known
from patchkit.runtime.shell.expansion import words_of
from patchkit.runtime.shell.programs import Place, Programs
from patchkit.runtime.shell.script import FileReader, read_shell

_INSTRUCTION = re.compile(r"\s*(?P<name>[A-Za-z]+)(?:\s+|$)")
_ESCAPE = re.compile(r"(?im)\A(?:#[^\n]*\n)*?#\s*escape\s*=\s*`\s*$")
_HEREDOC = re.compile(r"<<-?\s*(?P<quote>[\"']?)(?P<end>\w+)(?P=quote)")
_OPTION = re.compile(r"--[a-z][\w-]*(?:=\S*)?\s+")
_PAIR = re.compile(
    r"""(?P<name>[A-Za-z_]\w*)=(?P<value>(?:"(?:[^"\\]|\\.)*"|'[^']*'|\\.|[^\s"'\\])*)\s*""",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    text: Value  # with continued lines joined by a line break for each
    document: Value | None


def read_dockerfile(text: str, found: Collected, files: FileReader | None = None) -> None:
    """Add what a Dockerfile says."""
    _Dockerfile(found, files).read(text)


class _Dockerfile:
    def __init__(self, found: Collected, files: FileReader | None) -> None:
        self._found, self._files = found, files
        self._programs = Programs(found, self._shell)
        self._variables: dict[str, Value] = {}
        self._place = Place(line=1)
        self._entrypoint: list[Value] = []

    def read(self, text: str) -> None:
        for each in _instructions(text):
            line = each.text.line or 1
            self._place = replace(self._place, line=line)
            if each.name == "FROM":
                self._stage(each, line)
            elif each.name in ("ENV", "ARG"):
                self._set(each)
            elif each.name in ("RUN", "CMD", "ENTRYPOINT"):
                self._run(each)

    def _shell(self, text: Value, place: Place) -> None:
        variables = self._variables.items()
        read_shell(text, place, self._found, files=self._files, variables=variables)

    def _expanded(self, text: str, line: int) -> Value:
        return interpolate(text, line, self._variables.get, self._found.default)

    def _stage(self, each: _Instruction, line: int) -> None:
        words = _OPTION.sub("", each.text.text).split()
        image = self._expanded(words[0], line) if words else known("", line)
        if image.text and image.text != "scratch":
            self._found.images.append(image.word(line))
        # Arguments before the first FROM hold for the names of images, and mostly go on below.
        self._place = Place(line=line, block=line, image=image.text)
        self._entrypoint = []

    def _set(self, each: _Instruction) -> None:
        for line, name, value in self._pairs(each):
            self._variables[name] = value
            if each.name == "ENV":
                self._found.set(name, value, line, How.ENV, self._place.block)
            else:
                self._found.keep(name, value, line, self._place.block)

    def _pairs(self, each: _Instruction) -> Iterator[tuple[int, str, Value]]:
        text, position, any_found = each.text.text, 0, False
        lines = _Lines(each.text)
        while match := _PAIR.match(text, position):
            any_found = True
            line = lines.at(match.start())
            raw = match["value"].replace("\n", "")
            if raw[:1] == "'" and raw[-1:] == "'":
                yield line, match["name"], known(raw[1:-1], line)
            else:
                plain = re.sub(r"\\(.)", r"\1", raw.replace('"', "") if '"' in raw else raw)
                yield line, match["name"], self._expanded(plain, line)
            position = match.end()
        words = text.split(None, 1)
        if not any_found and each.name == "ENV" and len(words) == 2:  # ENV NAME value
            line = each.text.line
            yield line, words[0], self._expanded(words[1].strip(), line)

    def _run(self, each: _Instruction) -> None:
        place = replace(self._place, is_entry=each.name == "CMD")
        text = each.text.cut(_options_end(each.text.text)) if each.name == "RUN" else each.text
        words = _exec_form(text)
        if each.name == "ENTRYPOINT":
            self._entrypoint = words or words_of(text, self._found)
            if words:
                self._programs.run(words, place)
        elif words is not None and each.name == "CMD" and self._entrypoint:
            # The entrypoint alone was read already: with its arguments it says more.
            self._programs.run([*self._entrypoint, *words], replace(place, is_entry=False))
        elif words is not None:
            self._programs.run(words, place)
        if words is None:
            script = joined([text, each.document], "\n") if each.document else text
            if each.document and not _HEREDOC.sub("", text.text).strip():
                script = each.document  # RUN <<EOF: the document is the script
            self._shell(script, place)


def _instructions(text: str) -> Iterator[_Instruction]:
    escape = "`" if _ESCAPE.match(text) else "\\"
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        if not lines[number].strip() or lines[number].lstrip().startswith("#"):
            number += 1
            continue
        pieces: list[Piece] = []
        while number < len(lines):
            line = lines[number]
            number += 1
            if pieces and (not line.strip() or line.lstrip().startswith("#")):
                continue  # comments and empty lines do not end an instruction
            stripped = line.rstrip()
            goes_on = stripped.endswith(escape)
            pieces.append(Piece(stripped[: -len(escape)] if goes_on else line, number))
            if not goes_on:
                break
        match = _INSTRUCTION.match(pieces[0].text)
        if match is None:
            continue
        pieces[0] = replace(pieces[0], text=pieces[0].text[match.end() :])
        # A backslash and a line break again: a shell reads them as what they were.
        parts = [replace(each, text=f"{each.text} ") for each in pieces[:-1]]
        value = Value((*parts, pieces[-1]))
        name, document = match["name"].upper(), None
        ends = [each["end"] for each in _HEREDOC.finditer(value.text)]
        if name in ("RUN", "COPY", "ADD") and ends:
            start = number
            while number < len(lines) and ends:
                if lines[number].strip() == ends[0]:
                    ends.pop(0)
                number += 1
            body = "\n".join(lines[start : number if name == "RUN" else start])
            document = known(body, start + 1)
        yield _Instruction(name, value, document)


def _options_end(text: str) -> int:
    """Return where --mount=… and its kin end."""
    position = len(text) - len(text.lstrip())
    while match := _OPTION.match(text, position):
        position = match.end()
    return position


def _exec_form(text: Value) -> list[Value] | None:
    """Return the words of a JSON list; None for what a shell reads."""
    if not text.text.lstrip().startswith("["):
        return None
    try:
        words = json.loads(text.text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(words, list) or not all(isinstance(each, str) for each in words):
        return None
    found, position = [], 0
    lines = _Lines(text)
    for each in words:
        # Where it is written as it is read; else where the list begins.
        place = text.text.find(json.dumps(each, ensure_ascii=False), position)
        position = max(place, position)
        found.append(known(each, lines.at(position)))
    return found


class _Lines:
    """The line of each place in a text of pieces."""

    def __init__(self, value: Value) -> None:
        self._pieces = value.pieces

    def at(self, position: int) -> int:
        for piece in self._pieces:
            if position < len(piece.text):
                return piece.line + piece.text.count("\n", 0, position)
            position -= len(piece.text)
        return self._pieces[-1].line if self._pieces else 1
