"""Tell the kind of a file, and read its content by that kind."""

import re
import stat
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path, PurePath
from typing import Any

from patchkit.frozen import Fields
from patchkit.reading import read_text
from patchkit.runtime.check.commands import CommandReader, Place
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
from patchkit.runtime.check.shell_words import (
    find_open_quote,
    split_statements,
    split_words,
    unquote,
)
from patchkit.runtime.rules.releases import read_env_data
from patchkit.yaml_text import YamlError, read_nodes

_OTHER_FILE = "name another file, or check what runs: `patchkit check --running`"
_KINDS = read_env_data("said")["kinds"]

# NAME without a value is passed on from the caller. A line Environment= is one of a systemd unit.
_ENV_LINE = re.compile(
    r"[ \t]*(?:export[ \t]+)?(?!Environment=)(?P<name>[A-Za-z_]\w*)(?:[ \t]*=(?P<value>.*))?"
)
# A value, which ends before a blank and a #.
_ENV_VALUE = r"""(?:'[^']*'|"(?:[^"\\]|\\.)*"|[^\s'"]|[ \t]+(?!\#))*"""

_UNIT_VARIABLES = ("Environment", "DefaultEnvironment", "PassEnvironment")
# Signs between = and the program tell systemd how to start it.
_UNIT_COMMAND = re.compile(r"Exec\w*=[-@:+!|]*")

_CONTINUATION = "\\\n"
# A comment or an empty line of a Dockerfile, which does not end an instruction around it, and the
# blanks behind a backslash.
_SKIPPED = r"(?m)^[ \t]*#.*$|(?<=\\\n)[ \t]*$|\\[ \t]+$"
_EXEC_FORM = re.compile(
    r"^(?P<head>[ \t]*(?:CMD|ENTRYPOINT|RUN)\s(?:--\S+(?=\s)|\s|\\\n)*)"
    r'(?P<words>\[(?:\s|\\\n|,|"(?:[^"\\]|\\.)*")*\])[ \t]*$',
    re.IGNORECASE | re.DOTALL | re.MULTILINE,
)
_JSON_PIECE = re.compile(r'(?P<text>"(?:[^"\\]|\\.)*")|[\[\],]', re.DOTALL)


_KEYS = read_env_data("said")["yaml"]
_CONTAINER_KEYS = (*_KEYS["images"], *_KEYS["commands"])
_ENVIRONMENT = _KEYS["environment"]
_TEMPLATE = r"\{\{|\{%"  # of Helm or Jinja: only the filled-in text is YAML
_NULLS = {"", "~", "null", "Null", "NULL"}


def read_yaml(text: str, content: FileContent) -> None:
    """Add the variables, images and servers in YAML or JSON to the content.

    If the text cannot be read, add a problem instead.
    """
    if text.lstrip().startswith("{"):
        text = text.replace("\t", " ")  # JSON may be indented with tabs, YAML may not

    try:
        documents = read_nodes(text)
    except YamlError as error:
        finding_id = "template" if re.search(_TEMPLATE, text) else "not-yaml"
        problem = build_finding(finding_id, error.line, problem=error.problem)
        content.problems.append(problem)
        return

    reader = _YamlReader(CommandReader(content))
    for document in documents:
        reader.is_compose = "services" in _read_fields(document)
        reader.read_node(document, 0)


@dataclass(slots=True)
class _YamlReader:
    """Read the nodes of a document. A ``block`` is the line where a node's container begins."""

    commands: CommandReader
    is_compose: bool = False

    def read_node(self, node: Any, block: int) -> None:
        """Add the content of a node and of all nodes in it."""
        if node is None:
            return

        if node.id == "sequence":
            for item in node.value:
                self.read_node(item, block)
        elif node.id == "mapping":
            self._read_mapping(_read_fields(node), node, block)

    def _read_mapping(self, fields: Fields, node: Any, block: int) -> None:
        if not fields.keys().isdisjoint(_CONTAINER_KEYS):
            block = _line_of(node)
        place = self._read_image(fields, block)

        for key, inner in fields.items():
            if re.fullmatch(_ENVIRONMENT, key):
                self._read_environment(inner, block)
            elif key not in _KEYS["commands"] or _read_fields(inner):
                self.read_node(inner, block)

        self._read_command(fields, place)

    def _read_image(self, fields: Fields, block: int) -> Place:
        """Add the image of a container, if it has one, and return the place of its commands."""
        node: Any = next(
            (fields[key] for key in _KEYS["images"] if key in fields), None
        )
        if not _is_scalar(node) or not re.fullmatch(r"\S+", node.value):
            return Place(block)

        image = Image(node.value, _line_of(node), block)
        self.commands.content.images.append(image)

        return Place(block, image.text)

    def _read_environment(self, node: Any, block: int) -> None:
        """Add the variables of a mapping or a list.

        Items of a list are NAME=value, or mappings with name and value as in Kubernetes.
        """
        for name, value in _read_fields(node).items():
            self._add_variable(name, value, block)
        if node is None or node.id != "sequence":
            return

        for item in node.value:
            fields = _read_fields(item)
            if _is_scalar(item):
                word = Word(item.value, _line_of(item))
                self.commands.set_variables([word], block)
            elif _is_scalar(fields.get("name")):
                name = fields["name"].value
                self._add_variable(name, fields.get("value"), block)
            else:
                self._read_environment(item, block)

    def _add_variable(self, name: str, value: Any, block: int) -> None:
        content = self.commands.content
        if value is not None and not _is_scalar(value):
            self._read_environment(value, block)  # `<<` merges further ones
        elif value is None:
            content.passed.add(name)
        else:
            variable = Assignment(_line_of(value), name, value.value, block)
            content.variables.append(variable)

    def _read_command(self, fields: Fields, place: Place) -> None:
        """Read the command of a container: entrypoint and arguments, or the text of a script."""
        nodes = [fields[key] for key in _KEYS["commands"] if fields.get(key)]
        nodes = [node for node in nodes if node.id != "mapping" and node.value]
        if not nodes:
            return

        first = nodes[0]
        if len(nodes) == 1:
            is_text = first.id == "scalar" and "\n" in first.value
            if is_text and not self.is_compose:
                self.commands.read_script(first.value, _text_line(first), place.inside)
                return

        words: list[Word] = []
        for node in nodes:
            words += _read_words(node)
        has_entry = "entrypoint" in fields or {"command", "args"} <= fields.keys()
        self.commands.read_entry(words, place, has_entry=has_entry)


def _read_words(node: Any) -> list[Word]:
    """Return the words of a command: the items of a sequence, or the shell words of a scalar."""
    if node.id == "scalar":
        return split_words(node.value, _text_line(node))
    items = [item for item in node.value if _is_scalar(item) and item.value]
    return [Word(item.value, _text_line(item)) for item in items]


def _read_fields(node: Any) -> Fields:
    """Return key → node for a mapping, with None for a null; {} for any other node."""
    if node is None or node.id != "mapping":
        return {}

    fields = {key.value: value for key, value in node.value if _is_scalar(key)}
    nulls = [
        key
        for key, value in fields.items()
        if _is_scalar(value) and value.value in _NULLS and not value.style
    ]
    return fields | dict.fromkeys(nulls)


def _is_scalar(node: Any) -> bool:
    return node is not None and node.id == "scalar"


def _line_of(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _text_line(node: Any) -> int:
    """Return the line where the text of a node begins: below ``|`` or ``>``, if it has one."""
    return _line_of(node) + (node.style in ("|", ">"))


def read_file(path: Path) -> CheckedText:
    """Return the text and the content of a file; the path ``-`` means standard input.

    Raises UsageError or SourceError if it cannot be read as text.
    """
    is_stdin = str(path) == "-"
    text = read_text(None if is_stdin else path, hint=_OTHER_FILE)

    return CheckedText(
        where=str(path).replace("\n", r"\n"),
        content=read_content(text, str(path)),
        text=text,
        mode=0 if is_stdin else stat.S_IMODE(path.stat().st_mode),
    )


def read_content(text: str, where: str) -> FileContent:
    """Return the content of a text; ``where`` is the name of its file.

    A part that cannot be read becomes one of the content's problems, not an error.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    content = FileContent(kind_of(text, where))
    _read_by_kind(text, content)

    if not text.strip():
        content.problems.append(build_finding("empty", 1))
    return content


def _read_by_kind(text: str, content: FileContent) -> None:
    readers = {DOCKERFILE: _read_dockerfile, UNIT: _read_systemd_unit, YAML: read_yaml}

    if content.kind == PYTHON:
        finding = build_finding("not-read", 1, what="a Python program")
        content.problems.append(finding)
    elif content.kind in readers:
        readers[content.kind](text, content)
    elif content.kind == ENV and is_env_file(text):
        _read_env_file(text, content)
    else:
        # Only a shell can read an env file with other lines than assignments. All variables count
        # as exported, as after `set -a`.
        CommandReader(content, exports_all=content.kind == ENV).read_script(text)
        if content.kind == SHELL and (line := find_open_quote(text)):
            content.problems.append(
                build_finding("open-quote", line, names="the script")
            )


def kind_of(text: str, where: str) -> str:
    """Return the kind of a file by its name, or else by its text; by default it is SHELL.

    ``where`` is "-" or "" if the text has no name.
    """
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
    """Return whether all lines are NAME=value, NAME or comments, and one of them is no comment."""
    if text.startswith("#!"):
        return False

    lines = [line for line in text.split("\n") if line.strip()]
    assignments = [line for line in lines if line.lstrip()[0] not in "#;"]

    return bool(assignments) and all(map(_ENV_LINE.fullmatch, assignments))


def _read_env_file(text: str, content: FileContent) -> None:
    for number, line in enumerate(text.split("\n"), 1):
        match = _ENV_LINE.fullmatch(line)
        if match is None:
            continue

        if match["value"] is None:
            content.passed.add(match["name"])
            continue

        value = re.match(_ENV_VALUE, match["value"])
        plain = unquote(value[0].strip()) if value else ""
        content.variables.append(Assignment(number, match["name"], plain))


def _read_systemd_unit(text: str, content: FileContent) -> None:
    """Add the variables and commands of a systemd unit, as systemd.exec(5) describes them."""
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
    """Add the variables, images and commands of a Dockerfile.

    ENV sets variables of the environment, ARG private ones. RUN, CMD and ENTRYPOINT have commands.
    """
    reader = CommandReader(content)
    place = Place()
    entrypoint: list[Word] = []
    continued = re.sub(_SKIPPED, r"\\", text)

    for statement in split_statements(_EXEC_FORM.sub(_spell_exec_form, continued)):
        first, *words = statement.words
        name = first.text.upper()

        if first.text != "CMD":
            # Options of the instruction, such as --platform and --mount.
            words = [*dropwhile(lambda word: word.text.startswith("--"), words)]

        match name:
            case "FROM" if words:
                place = Place(block=first.line, image=words[0].text)
                entrypoint = []
                content.images.append(Image(place.image, first.line, place.block))
            case "ENV" | "ARG":
                reader.set_variables(words, place.block, is_private=name == "ARG")
            case "ENTRYPOINT":
                entrypoint = words
                reader.read_entry(words, place, has_entry=True)
            case "CMD":
                has_entry = bool(entrypoint)
                reader.read_entry([*entrypoint, *words], place, has_entry=has_entry)
            case "RUN":
                reader.read_command(words, place)
            case _:
                # No instruction, but a further command of a RUN, behind && or the like.
                reader.read_command(statement.words, place)


def _spell_exec_form(form: re.Match[str]) -> str:
    """Return an instruction in exec form (its words are a JSON list) as shell words.

    The number of lines stays the same.
    """
    return form["head"] + _JSON_PIECE.sub(_spell_json_piece, form["words"])


def _spell_json_piece(piece: re.Match[str]) -> str:
    """Return a string of JSON as a shell word with as many lines, a bracket or comma as a blank.

    A shell reads a string of JSON nearly as JSON does. A line break in it becomes a semicolon: a
    word that is a script of several lines is one line then.
    """
    text = piece["text"] or " "
    word = text.replace(_CONTINUATION, "").replace(r"\n", ";")
    continuations = f" {_CONTINUATION}" * text.count(_CONTINUATION)
    return word + continuations
