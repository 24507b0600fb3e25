"""Read what a file says, by its kind: the one entry for all formats."""

from __future__ import annotations

import json
import re
import shlex
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from patchkit.reading import read_text
from patchkit.records import RecordError, read_json
from patchkit.runtime.check.commands import (
    CommandReader,
    Place,
    split_statements,
    unquote,
)
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
    build_finding,
)
from patchkit.runtime.rules.releases import read_env_data
from patchkit.yaml_text import YamlError, read_nodes

_ENV_LINE = re.compile(
    r"[ \t]*(?:export[ \t]+)?(?!Environment=)(?P<name>[A-Za-z_]\w*)(?:=(?P<value>.*))?"
)
_ENV_VALUE = re.compile(r"""(?:'[^']*'|"(?:[^"\\]|\\.)*"|[^\s'"]|[ \t]+(?!\#))*""")
_GOES_ON = "\\\n"
_EXEC_FORM = re.compile(
    r"(?P<head>\s*(?:CMD|ENTRYPOINT|RUN)\s(?:--\S+(?=\s)|\s|\\\n)*)(?P<words>\[.*\])\s*",
    re.IGNORECASE | re.DOTALL,
)
_JSON_PIECE = re.compile(r'(?P<text>"(?:[^"\\]|\\.)*")|[\[\],]', re.DOTALL)
_KINDS, _YAML = (read_env_data("said")[name] for name in ("kinds", "yaml"))
_EXEC = re.compile(r"Exec\w*=[-@:+!|]*")
_OTHER = "name another file, or check what runs: `patchkit check --running`"
_TEMPLATE = re.compile(r"\{\{|\{%")  # of Helm or Jinja: YAML when it is filled in
_ENVIRONMENT = re.compile(_YAML["environment"])
_IMAGES, _COMMANDS = _YAML["images"], _YAML["commands"]
_NULLS = {"", "~", "null", "Null", "NULL"}


def read_file(path: Path) -> CheckedText:
    """Return what a file, or - for standard input, says. Raises UsageError, SourceError."""
    stdin = str(path) == "-"
    text = read_text(None if stdin else path, hint=_OTHER)
    mode = None if stdin else stat.S_IMODE(path.stat().st_mode)
    content = read_content(text, str(path))
    return CheckedText(where=str(path), content=content, text=text, mode=mode)


def read_content(text: str, where: str) -> FileContent:
    """Return what a file of this name says literally; what cannot be read is a problem of it."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    content = FileContent(kind_of(text, where))
    readers = {DOCKERFILE: _read_dockerfile, UNIT: _read_unit, YAML: _read_yaml}
    try:
        if content.kind == PYTHON:
            content.problems.append(
                build_finding("not-read", 1, what="a Python program")
            )
        elif content.kind in readers:
            readers[content.kind](text, content)
        elif content.kind == ENV and is_env_file(text):
            for number, match in enumerate(
                map(_ENV_LINE.fullmatch, text.split("\n")), 1
            ):
                if match and match["value"] is None:
                    content.passed.add(match["name"])  # a name alone is the caller's
                elif match:
                    value = _ENV_VALUE.match(match["value"])  # up to a # behind a blank
                    plain = unquote(value[0].strip()) if value else ""
                    content.add_variable(Assignment(number, match["name"], plain))
        else:
            # What is named as an env file and holds more than lines is sourced, with set -a.
            CommandReader(content, exports_all=content.kind == ENV).read_script(text)
    except RecursionError:
        content.problems.append(
            build_finding("not-yaml", 1, problem="it is nested too deeply")
        )
    return content


def kind_of(text: str, where: str) -> str:
    """Return the kind of a file by its name, else by its text; ``where`` is - or "" for none."""
    name = re.sub(_KINDS["variants"], "", PurePath(where).name.lower())
    kind: str = next(
        (kind for form, kind in _KINDS["names"] if re.search(form, name)), ""
    )
    if kind == ENV and text.startswith("{"):
        return YAML  # JSON, under whatever name
    if kind or is_env_file(text):
        return kind or ENV
    return next((kind for form, kind in _KINDS["texts"] if re.match(form, text)), SHELL)


def is_env_file(text: str) -> bool:
    """Return whether a text is a list of NAME=value alone, as systemd and docker read it."""
    lines = [
        line
        for line in text.split("\n")
        if line.strip() and line.lstrip()[0] not in "#;"
    ]
    return (
        bool(lines)
        and not text.startswith("#!")
        and all(map(_ENV_LINE.fullmatch, lines))
    )


def _read_unit(text: str, content: FileContent) -> None:
    """Add what a systemd unit sets and runs, by systemd.exec(5)."""
    reader = CommandReader(content)
    for (first, *rest), _indented in split_statements(re.sub(r"(?m)^\s*;.*", "", text)):
        key, _, value = first.text.partition("=")
        if key in ("Environment", "DefaultEnvironment", "PassEnvironment"):
            reader.set_variables([Word(value, first.line), *rest], 0)
        elif _EXEC.match(first.text):
            # The signs before the program say how it is started.
            program = Word(_EXEC.sub("", first.text), first.line)
            reader.read_command([program, *rest], Place())


def _read_dockerfile(text: str, content: FileContent) -> None:
    """Add what a Dockerfile says: ENV is environment, ARG is not, RUN and its kin are commands."""
    reader, place = CommandReader(content), Place()
    entrypoint: list[Word] = []
    instructions = map(_spell_exec_form, _split_instructions(text))
    for statement, _indented in split_statements("\n".join(instructions)):
        first, *words = statement
        while words and words[0].text.startswith("--") and first.text != "CMD":
            words = words[1:]  # options such as --platform and --mount
        name = first.text.upper()
        if name == "FROM" and words:
            place, entrypoint = Place(block=first.line, image=words[0].text), []
            content.images.append(Image(place.image, first.line, place.block))
        elif name in ("ENV", "ARG"):
            if len(words) > 1 and "=" not in words[0].text:  # ENV NAME value
                value = " ".join(word.text for word in words[1:])
                words = [Word(f"{words[0].text}={value}", first.line)]
            reader.set_variables(words, place.block, own=name == "ARG")
        elif name == "ENTRYPOINT":
            entrypoint = words
            reader.read_entry(words, place, has_entry=bool(words))
        elif name == "CMD":
            reader.read_entry([*entrypoint, *words], place, has_entry=bool(entrypoint))
        else:
            # RUN, and what follows in it behind && and the like.
            reader.read_command(words if name == "RUN" else statement, place)


def _split_instructions(text: str) -> Iterator[str]:
    """Yield each instruction of a Dockerfile, with the lines in which it goes on."""
    lines: list[str] = []
    for line in text.split("\n"):
        if lines and not lines[-1].endswith("\\"):
            yield "\n".join(lines)
            lines = []
        # Comments and empty lines do not end an instruction that goes on below.
        is_passed = lines and re.match(r"\s*(#|$)", line)
        lines.append("\\" if is_passed else line.rstrip())
    yield "\n".join(lines)


def _spell_exec_form(instruction: str) -> str:
    """Return an instruction whose words are JSON as a shell would have them, line by line.

    Any other is returned as it is: what is no JSON runs in a shell.
    """
    form = _EXEC_FORM.fullmatch(instruction)
    if form is None:
        return instruction
    try:
        read_json(tuple[str, ...], form["words"].replace(_GOES_ON, ""))
    except RecordError:
        return instruction
    return form["head"] + _JSON_PIECE.sub(_spell_piece, form["words"])


def _spell_piece(piece: re.Match[str]) -> str:
    """Return a word of JSON as one of a shell, in as many lines; brackets and commas as a blank."""
    if piece["text"] is None:
        return " "
    text = str(json.loads(piece[0].replace(_GOES_ON, "")))
    return shlex.quote(text.replace("\n", ";")) + f" {_GOES_ON}" * piece[0].count(
        _GOES_ON
    )


def _read_yaml(text: str, content: FileContent) -> None:
    """Add what YAML or JSON says; what cannot be read is a problem of the content."""
    if text.lstrip().startswith("{"):
        text = text.replace("\t", " ")  # JSON may be indented with tabs, YAML may not
    try:
        documents = read_nodes(text)
    except YamlError as error:
        key = "template" if _TEMPLATE.search(text) else "not-yaml"
        content.problems.append(build_finding(key, error.line, problem=error.problem))
        return
    reader = _YamlReader(CommandReader(content))
    for document in documents:
        reader.is_compose = "services" in _map_keys(document)
        reader.visit_node(document, 0)


@dataclass(slots=True)
class _YamlReader:
    reader: CommandReader
    is_compose: bool = False

    def visit_node(self, node: Any, block: int) -> None:
        """Add what a node says; ``block`` is the line of the container that it is part of."""
        if node is None:
            return
        if node.id == "sequence":
            for item in node.value:
                self.visit_node(item, block)
        if node.id != "mapping":
            return
        fields = _map_keys(node)
        if not fields.keys().isdisjoint((*_IMAGES, *_COMMANDS)):
            block = node.start_mark.line + 1
        place = Place(block=block)
        image = next((fields[name] for name in _IMAGES if name in fields), None)
        if (
            image is not None
            and image.id == "scalar"
            and re.fullmatch(r"\S+", image.value)
        ):
            place = replace(place, image=image.value)
            line = image.start_mark.line + 1
            self.reader.content.images.append(Image(image.value, line, block))
        for name, inner in fields.items():
            if _ENVIRONMENT.fullmatch(name):
                self._read_environment(inner, block)
            elif name not in _COMMANDS or inner.id == "mapping":
                self.visit_node(inner, block)
        self._read_command(fields, place)

    def _read_environment(self, node: Any, block: int) -> None:
        if node is None or node.id == "scalar":
            return
        content = self.reader.content
        for item in node.value:
            name, value = item if node.id == "mapping" else (None, item)
            fields = _map_keys(value)
            if name is None and "name" in fields:  # of Kubernetes
                name, value = fields["name"], fields.get("value")
            if value is not None and value.id != "scalar":
                self._read_environment(value, block)
            elif name and (
                value is None or (value.value in _NULLS and not value.style)
            ):
                content.passed.add(str(name.value))
            elif name is None:
                self.reader.set_variables(
                    [Word(value.value, value.start_mark.line + 1)], block
                )
            elif isinstance(name.value, str):
                line = value.start_mark.line + 1
                content.add_variable(Assignment(line, name.value, value.value, block))

    def _read_command(self, fields: Mapping[str, Any], place: Place) -> None:
        nodes = [fields[name] for name in _COMMANDS if name in fields]
        nodes = [node for node in nodes if node.id != "mapping" and node.value]
        if not nodes or ("args" in fields and len(nodes) == 1 and not place.image):
            return
        words: list[Word] = []
        lists = [node for node in nodes if node.id == "sequence"]
        items = [
            item for node in nodes for item in (node.value if node in lists else [node])
        ]
        for item in (item for item in items if item.id == "scalar" and item.value):
            line = (
                item.start_mark.line + 1 + (item.style in ("|", ">"))
            )  # a block begins below
            if lists and item not in nodes:
                words.append(Word(item.value, line))
            elif len(nodes) == 1 and "\n" in item.value and not self.is_compose:
                self.reader.read_script(item.value, line, replace(place, depth=1))
            else:
                found = split_statements(item.value, line)
                words += (word for statement, _indented in found for word in statement)
        has_entry = "entrypoint" in fields or {"command", "args"} <= fields.keys()
        self.reader.read_entry(words, place, has_entry=has_entry)


def _map_keys(node: Any) -> dict[str, Any]:
    """Return a mapping by its keys; what is no mapping is empty."""
    pairs = node.value if node is not None and node.id == "mapping" else []
    return {key.value: value for key, value in pairs if key.id == "scalar"}
