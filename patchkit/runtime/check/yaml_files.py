"""Read variables, images and servers from YAML and JSON.

Such files are compose files, manifests of Kubernetes, and values of Helm.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from patchkit.runtime.check.commands import CommandReader, Place
from patchkit.runtime.check.content import Assignment, FileContent, Image, Word
from patchkit.runtime.check.finding_texts import build_finding
from patchkit.runtime.check.shell_words import split_words
from patchkit.runtime.rules.releases import read_env_data
from patchkit.yaml_text import YamlError, read_nodes

_KEYS = read_env_data("said")["yaml"]
_CONTAINER_KEYS = (*_KEYS["images"], *_KEYS["commands"])
_ENVIRONMENT = re.compile(_KEYS["environment"])
_TEMPLATE = re.compile(r"\{\{|\{%")  # of Helm or Jinja: only the filled-in text is YAML
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
        finding_id = "template" if _TEMPLATE.search(text) else "not-yaml"
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

    def _read_mapping(self, fields: dict[str, Any], node: Any, block: int) -> None:
        if not fields.keys().isdisjoint(_CONTAINER_KEYS):
            block = _line_of(node)
        place = self._read_image(fields, block)

        for key, inner in fields.items():
            if _ENVIRONMENT.fullmatch(key):
                self._read_environment(inner, block)
            elif key not in _KEYS["commands"] or inner.id == "mapping":
                self.read_node(inner, block)

        self._read_command(fields, place)

    def _read_image(self, fields: dict[str, Any], block: int) -> Place:
        """Add the image of a container, if it has one, and return the place of its commands."""
        nodes = [fields[key] for key in _KEYS["images"] if key in fields]
        if not nodes or not _is_scalar(nodes[0]):
            return Place(block)

        node = nodes[0]
        if not re.fullmatch(r"\S+", node.value):
            return Place(block)

        image = Image(node.value, _line_of(node), block)
        self.commands.content.images.append(image)

        return Place(block, image.text)

    def _read_environment(self, node: Any, block: int) -> None:
        """Add the variables of a mapping or a list.

        Items of a list are NAME=value, or mappings with name and value as in Kubernetes.
        """
        if node is None:
            return

        if node.id == "mapping":
            for name, value in node.value:
                self._add_variable(name, value, block)
        elif node.id == "sequence":
            for item in node.value:
                self._read_variable(item, block)

    def _read_variable(self, item: Any, block: int) -> None:
        fields = _read_fields(item)
        if "name" in fields:
            self._add_variable(fields["name"], fields.get("value"), block)
        elif _is_scalar(item):
            word = Word(item.value, _line_of(item))
            self.commands.set_variables([word], block)
        else:
            self._read_environment(item, block)

    def _add_variable(self, name: Any, value: Any, block: int) -> None:
        content = self.commands.content
        if value is not None and not _is_scalar(value):
            self._read_environment(value, block)
        elif value is None or (value.value in _NULLS and not value.style):
            content.passed.add(str(name.value))
        elif isinstance(name.value, str):
            variable = Assignment(_line_of(value), name.value, value.value, block)
            content.variables.append(variable)

    def _read_command(self, fields: dict[str, Any], place: Place) -> None:
        """Read the command of a container: entrypoint and arguments, or the text of a script."""
        nodes = _find_nodes(fields, _KEYS["commands"])
        if not nodes:
            return

        first = nodes[0]
        if len(nodes) == 1:
            # Arguments alone are for the image's program. Without an image, that is unknown.
            if "args" in fields and not place.image:
                return
            is_text = first.id == "scalar" and "\n" in first.value
            if is_text and not self.is_compose:
                self.commands.read_script(first.value, _text_line(first), place.inside)
                return

        words: list[Word] = []
        for node in nodes:
            words += _read_words(node)
        has_entry = "entrypoint" in fields or {"command", "args"} <= fields.keys()
        self.commands.read_entry(words, place, has_entry=has_entry)


def _find_nodes(fields: dict[str, Any], keys: list[str]) -> list[Any]:
    """Return the nodes of ``keys``, in this order; leave out mappings and empty nodes."""
    nodes = [fields[key] for key in keys if key in fields]
    return [node for node in nodes if node.id != "mapping" and node.value]


def _read_words(node: Any) -> list[Word]:
    """Return the words of a command: the items of a sequence, or the shell words of a scalar."""
    if node.id == "scalar":
        return split_words(node.value, _text_line(node))
    items = [item for item in node.value if _is_scalar(item) and item.value]
    return [Word(item.value, _text_line(item)) for item in items]


def _read_fields(node: Any) -> dict[str, Any]:
    """Return key → node for a mapping, {} for any other node."""
    if node is None or node.id != "mapping":
        return {}
    return {key.value: value for key, value in node.value if _is_scalar(key)}


def _is_scalar(node: Any) -> bool:
    return node is not None and node.id == "scalar"


def _line_of(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _text_line(node: Any) -> int:
    """Return the line where the text of a node begins: below ``|`` or ``>``, if it has one."""
    return _line_of(node) + (node.style in ("|", ">"))
