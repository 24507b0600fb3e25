"""Read compose files, Kubernetes manifests, recipes and JSON by what their keys mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from patchkit.runtime.check.commands import CommandReader, Place
from patchkit.runtime.check.content import Assignment, FileContent, Image, Word, build_finding
from patchkit.runtime.check.shell_words import split_statements

_MOST_NODES = 100_000  # a few aliases may stand for any number of nodes
_DEEPEST, _MOST_EVENTS = 64, 400_000
_ENVIRONMENT = re.compile(r"(?i)(?:.*[-_.])?(?:env|envs|environment|env_?vars|extraenv\w*)|\w+Env")
_IMAGES = ("image", "container", "container_image", "docker_image", "base_image")
_COMMANDS = ("entrypoint", "command", "cmd", "args")
_NULLS = {"", "~", "null", "Null", "NULL"}


def read_yaml(text: str, content: FileContent) -> None:
    """Add what YAML or JSON says; what cannot be read is a problem of the content."""
    import yaml  # 20 ms, and for YAML alone

    if text.lstrip().startswith("{"):
        text = text.replace("\t", " ")  # JSON may be indented with tabs, YAML may not
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        for number, event in enumerate(yaml.parse(text, Loader=loader)):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST or number > _MOST_EVENTS:
                what = "too large or nested too deeply"
                raise yaml.MarkedYAMLError(problem=what, problem_mark=event.start_mark)
        reader = _YamlReader(CommandReader(content), text.split("\n"))
        for document in yaml.compose_all(text, Loader=loader):
            reader.read_document(document)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = min(mark.line, text.count("\n")) + 1 if mark else 1
        what = f"the file, as YAML: {getattr(error, 'problem', None) or 'odd characters'}"
        content.problems.append(build_finding("not-read", line, what=what))


@dataclass(slots=True)
class _YamlReader:
    reader: CommandReader
    lines: list[str]
    left: int = _MOST_NODES
    is_compose: bool = False

    def read_document(self, node: Any) -> None:
        """Read a document; of a ConfigMap the variables."""
        top = _map_keys(node)
        self.is_compose = "services" in top
        if getattr(top.get("kind"), "value", "") == "ConfigMap":
            self._read_environment(top.get("data"), 0)
        else:
            self._visit_node(node, 0)

    def _visit_node(self, node: Any, block: int) -> None:
        self.left -= 1
        if self.left < 0 or node is None:
            return
        if node.id == "sequence":
            for item in node.value:
                self._visit_node(item, block)
        if node.id != "mapping":
            return
        fields = _map_keys(node)
        if not fields.keys().isdisjoint((*_IMAGES, *_COMMANDS)):
            block = node.start_mark.line + 1
        place = Place(block=block)
        image = next((fields[name] for name in _IMAGES if name in fields), None)
        if image is not None and image.id == "scalar" and re.fullmatch(r"\S+", image.value):
            place = replace(place, image=image.value)
            line = image.start_mark.line + 1
            self.reader.content.images.append(Image(image.value, line, block))
        for name, inner in fields.items():
            if _ENVIRONMENT.fullmatch(name):
                self._read_environment(inner, block)
            elif name not in _COMMANDS or inner.id == "mapping":
                self._visit_node(inner, block)
        self._read_command(fields, place)

    def _read_environment(self, node: Any, block: int) -> None:
        if node is None or node.id == "scalar":
            return
        for item in node.value:
            self.left -= 1
            key, value = item if node.id == "mapping" else (None, item)
            fields = _map_keys(value)
            if self.left < 0:
                return
            if key is not None:
                self._set_variable(key.value, value, block)
            elif "name" in fields:  # of Kubernetes
                self._set_variable(fields["name"].value, fields.get("value"), block)
            elif value.id == "scalar":
                self.reader.set_variables([Word(value.value, value.start_mark.line + 1)], block)

    def _set_variable(self, name: Any, value: Any, block: int) -> None:
        content = self.reader.content
        if value is not None and value.id != "scalar":
            self._read_environment(value, block)
        elif value is None or (value.value in _NULLS and not value.style):
            content.passed.add(str(name))
        elif isinstance(name, str):
            content.add_variable(Assignment(value.start_mark.line + 1, name, value.value, block))

    def _read_command(self, fields: Mapping[str, Any], place: Place) -> None:
        nodes = [fields[name] for name in _COMMANDS if name in fields]
        nodes = [node for node in nodes if node.id != "mapping" and node.value]
        if not nodes or ("args" in fields and len(nodes) == 1 and not place.image):
            return
        is_text = len(nodes) == 1 and nodes[0].id == "scalar" and not self.is_compose
        if is_text and "\n" in nodes[0].value:
            self.reader.read_script(*self._find_source(nodes[0]), replace(place, depth=1))
        else:
            words = [word for node in nodes for word in self._split_words(node)]
            has_entry = "entrypoint" in fields or {"command", "args"} <= fields.keys()
            self.reader.read_entry(words, place, has_entry=has_entry)

    def _split_words(self, node: Any) -> Iterator[Word]:
        for item in node.value if node.id == "sequence" else [node]:
            text, line = self._find_source(item) if item.id == "scalar" else ("", 0)
            if node.id == "sequence" and text:
                yield Word(text, line)
            elif text:
                for statement in split_statements(text, line):
                    yield from statement.words

    def _find_source(self, node: Any) -> tuple[str, int]:
        """Return a scalar and its first line; of a block the lines as they stand in the file."""
        line = node.start_mark.line + 1
        if node.style not in ("|", ">"):
            return node.value, line
        rows = self.lines[line : node.end_mark.line]
        indent = min((len(row) - len(row.lstrip()) for row in rows if row.strip()), default=0)
        text = "\n".join(row[indent:].rstrip() for row in rows)
        # Folded lines are one; so is a line that begins with a dash and the one above.
        joins = r"(?<![\\\n])\n(?=\S)" if node.style == ">" else r"(?<!\\)\n(?=\s*-)"
        return re.sub(joins, " \\\\\n", text), line + 1


def _map_keys(node: Any) -> dict[str, Any]:
    """Return a mapping by its keys; what is no mapping is empty."""
    pairs = node.value if node is not None and node.id == "mapping" else []
    return {key.value: value for key, value in pairs if key.id == "scalar"}
