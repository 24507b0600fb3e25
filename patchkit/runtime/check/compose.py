"""Read variables, images and servers of compose files, in YAML or JSON."""

from __future__ import annotations

import re
from typing import Any

from patchkit.runtime.check.commands import CommandReader, Place
from patchkit.runtime.check.content import Assignment, FileContent, Image, Word
from patchkit.runtime.check.finding_texts import build_finding
from patchkit.runtime.check.shell_words import split_statements
from patchkit.yaml_text import YamlError, read_nodes

_NULLS = {"", "~", "null", "Null", "NULL"}


def read_compose(text: str, content: FileContent) -> None:
    """Add what the services say; what cannot be read is a problem of the content."""
    try:
        documents = read_nodes(text)
    except YamlError as error:
        problem = build_finding("not-yaml", error.line, problem=error.problem)
        content.problems.append(problem)
        return

    services: list[Any] = []
    for document in documents:
        fields = _read_fields(document)
        services += _read_fields(fields.get("services")).values()

    if not services:
        problem = build_finding("not-read", 1, what="YAML that is no compose file")
        content.problems.append(problem)

    for service in services:
        _read_service(service, CommandReader(content))


def _read_service(service: Any, reader: CommandReader) -> None:
    fields = _read_fields(service)
    place = Place(_line_of(service))

    image: Any = fields.get("image")
    if _is_scalar(image) and re.fullmatch(r"\S+", image.value):
        place = Place(place.block, image.value)
        row = Image(image.value, _line_of(image), place.block)
        reader.content.images.append(row)

    _read_environment(fields.get("environment"), place.block, reader)

    words = _read_words(fields.get("entrypoint")) + _read_words(fields.get("command"))
    reader.read_entry(words, place, has_entry="entrypoint" in fields)


def _read_environment(node: Any, block: int, reader: CommandReader) -> None:
    """Add the variables of a mapping, or of a list of NAME=value."""
    reader.set_variables(_list_words(node), block)

    for name, value in _read_fields(node).items():
        if not _is_scalar(value):
            continue

        if value.value in _NULLS and not value.style:
            reader.content.passed.add(name)
        else:
            variable = Assignment(_line_of(value), name, value.value, block)
            reader.content.variables.append(variable)


def _read_words(node: Any) -> list[Word]:
    """Return the words of a command: the items of a sequence, or those of a shell's line."""
    if _is_scalar(node):
        statements = split_statements(node.value, _text_line(node))
        return [word for statement in statements for word in statement.words]
    return _list_words(node)


def _list_words(node: Any) -> list[Word]:
    """Return the items of a sequence; what is no sequence has none."""
    if node is None or node.id != "sequence":
        return []
    items = [item for item in node.value if _is_scalar(item) and item.value]
    return [Word(item.value, _text_line(item)) for item in items]


def _read_fields(node: Any) -> dict[str, Any]:
    """Return a mapping by its keys, with those that it merges; what is no mapping is empty."""
    fields: dict[str, Any] = {}
    if node is None or node.id != "mapping":
        return fields

    for key, value in node.value:
        if not _is_scalar(key):
            continue
        if key.value == "<<":
            merged = value.value if value.id == "sequence" else [value]
            for part in merged:
                fields = {**_read_fields(part), **fields}
        else:
            fields[key.value] = value

    return fields


def _is_scalar(node: Any) -> bool:
    return node is not None and node.id == "scalar"


def _line_of(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _text_line(node: Any) -> int:
    """Return the line where a scalar's text begins: that of a block begins below its sign."""
    return _line_of(node) + (node.style in ("|", ">"))
