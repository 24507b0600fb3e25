"""Read what a file says, by its kind: the one entry for all formats."""

from __future__ import annotations

import re
import shlex
import stat
from pathlib import Path, PurePath

from patchkit.reading import read_text
from patchkit.records import RecordError, read_json
from patchkit.runtime.check.commands import CommandReader, Place
from patchkit.runtime.check.compose import read_compose
from patchkit.runtime.check.content import (
    DOCKERFILE,
    ENV,
    PYTHON,
    SHELL,
    UNIT,
    YAML,
    Assignment,
    CheckedText,
    FileContent,
    Image,
    Word,
)
from patchkit.runtime.check.finding_texts import build_finding
from patchkit.runtime.check.shell_words import split_statements, unquote
from patchkit.runtime.rules.releases import read_env_data

_OTHER_FILE = "name another file, or check what runs: `patchkit check --running`"
_KINDS = read_env_data("said")["kinds"]

_SETS = re.compile(r"\s*[^\s#;]")
# A name alone gets the caller's value. Environment= is a line of a unit.
_ENV_LINE = re.compile(
    r"[ \t]*(?:export[ \t]+)?(?!Environment=)(?P<name>[A-Za-z_]\w*)(?:=(?P<value>.*))?"
)
# A value ends at a # behind a blank.
_ENV_VALUE = re.compile(r"""(?:'[^']*'|"(?:[^"\\]|\\.)*"|[^\s'"]|[ \t]+(?!\#))*""")

_UNIT_VARIABLES = ("Environment", "DefaultEnvironment", "PassEnvironment")
# The signs before the program say how it is started.
_UNIT_COMMAND = re.compile(r"Exec\w*=[-@:+!|]*")

_CONTINUATION = "\\\n"
# An instruction with the lines in which it goes on; comments and empty lines among them.
_INSTRUCTION = re.compile(r"(?:.*\\\n)*.*\n?")
_INNER_LINES = re.compile(r"(?<=\\\n)(?:[ \t]*(?:#.*)?\n)+")
_EXEC_FORM = re.compile(
    r"(?P<head>\s*(?:CMD|ENTRYPOINT)\s+)(?P<words>\[.*\])\s*", re.IGNORECASE | re.DOTALL
)


def read_file(path: Path) -> CheckedText:
    """Return what a file, or - for standard input, says. Raises UsageError, SourceError."""
    is_stdin = str(path) == "-"
    text = read_text(None if is_stdin else path, hint=_OTHER_FILE)

    return CheckedText(
        where=str(path),
        content=read_content(text, str(path)),
        text=text,
        mode=0 if is_stdin else stat.S_IMODE(path.stat().st_mode),
    )


def read_content(text: str, where: str) -> FileContent:
    """Return what a file of this name says literally; what cannot be read is a problem of it."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    content = FileContent(kind_of(text, where))
    readers = {
        DOCKERFILE: _read_dockerfile,
        UNIT: _read_systemd_unit,
        YAML: read_compose,
    }

    if content.kind == PYTHON:
        finding = build_finding("not-read", 1, what="a Python program")
        content.problems.append(finding)
    elif content.kind in readers:
        readers[content.kind](text, content)
    elif content.kind == ENV and is_env_file(text):
        _read_env_file(text, content)
    else:
        # An env file of more than assignments is sourced, with set -a.
        exports_all = content.kind == ENV
        CommandReader(content, exports_all=exports_all).read_script(text, 1, Place())

    return content


def kind_of(text: str, where: str) -> str:
    """Return the kind of a file by its name, else by its text; ``where`` is - or "" for none."""
    file_name = PurePath(where).name.lower()
    name = re.sub(_KINDS["variants"], "", file_name)

    for form, kind in _KINDS["names"]:
        if re.search(form, name):
            return str(kind)

    if is_env_file(text):
        return ENV

    for form, kind in _KINDS["texts"]:
        if re.match(form, text):
            return str(kind)

    return SHELL


def is_env_file(text: str) -> bool:
    """Return whether a text is a list of NAME=value alone, as systemd and docker read it."""
    if text.startswith("#!"):
        return False

    assignments = [line for line in text.split("\n") if _SETS.match(line)]

    return bool(assignments) and all(map(_ENV_LINE.fullmatch, assignments))


def _read_env_file(text: str, content: FileContent) -> None:
    for number, line in enumerate(text.split("\n"), 1):
        match = _ENV_LINE.fullmatch(line)
        if match is None:
            continue

        if match["value"] is None:
            content.passed.add(match["name"])
            continue

        value = _ENV_VALUE.match(match["value"])
        plain = unquote(value[0].strip()) if value else ""
        content.variables.append(Assignment(number, match["name"], plain))


def _read_systemd_unit(text: str, content: FileContent) -> None:
    """Add what a systemd unit sets and runs, by systemd.exec(5)."""
    reader = CommandReader(content)
    uncommented = re.sub(r"(?m)^\s*;.*", "", text)

    for statement in split_statements(uncommented):
        first, *others = statement.words
        key, _sign, value = first.text.partition("=")

        if key in _UNIT_VARIABLES:
            reader.set_variables([Word(value, first.line), *others], 0)
        elif _UNIT_COMMAND.match(first.text):
            program = Word(_UNIT_COMMAND.sub("", first.text), first.line)
            reader.read_command([program, *others], Place())


def _read_dockerfile(text: str, content: FileContent) -> None:
    """Add what a Dockerfile says: ENV is environment, ARG is not; RUN is not read."""
    reader = CommandReader(content)
    place = Place()
    entrypoint: list[Word] = []

    text = re.sub(r"(?m)[ \t]+$", "", text)
    # Comments and empty lines do not end an instruction that goes on below.
    text = _INNER_LINES.sub(lambda lines: _CONTINUATION * lines[0].count("\n"), text)
    instructions = map(_spell_exec_form, _INSTRUCTION.findall(text))

    for statement in split_statements("".join(instructions)):
        first, *words = statement.words
        name = first.text.upper()

        match name:
            case "FROM":
                images = [word for word in words if not word.text.startswith("--")]
                if images:
                    place = Place(block=first.line, image=images[0].text)
                    content.images.append(Image(place.image, first.line, place.block))
                entrypoint = []
            case "ENV" | "ARG":
                if len(words) > 1 and "=" not in words[0].text:  # NAME several words
                    value = " ".join(word.text for word in words[1:])
                    words = [Word(f"{words[0].text}={value}", words[0].line)]
                reader.set_variables(words, place.block, is_private=name == "ARG")
            case "ENTRYPOINT":
                entrypoint = words
                reader.read_entry(words, place, has_entry=True)
            case "CMD":
                has_entry = bool(entrypoint)
                reader.read_entry([*entrypoint, *words], place, has_entry=has_entry)


def _spell_exec_form(instruction: str) -> str:
    """Return an instruction whose words are JSON as a shell would have them, in its first line.

    Any other is returned as it is: what is no JSON runs in a shell.
    """
    form = _EXEC_FORM.fullmatch(instruction.replace(_CONTINUATION, ""))
    if form is None:
        return instruction

    try:
        words = read_json(tuple[str, ...], form["words"])
    except RecordError:
        return instruction

    # A script in a word stays in its line.
    command = shlex.join(word.replace("\n", ";") for word in words)
    blank_lines = f" {_CONTINUATION}" * instruction.count(_CONTINUATION)
    return f"{form['head']}{command}{blank_lines}\n"
