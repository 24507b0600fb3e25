"""Read compose files, Kubernetes manifests, recipes, workflows and JSON by what their keys mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from patchkit.runtime.files.collected import Collected
from patchkit.runtime.files.content import ContainerOptions, How
from patchkit.runtime.files.interpolation import interpolate
from patchkit.runtime.files.value import Piece, Value, known, unknown
from patchkit.runtime.formats.yaml_tree import TEMPLATE, YamlNode, parse_yaml
from patchkit.runtime.shell.expansion import words_of
from patchkit.runtime.shell.programs import Place, Programs
from patchkit.runtime.shell.script import FileReader, read_shell

_MOST_NODES = 100_000  # a few aliases may stand for any number of nodes
_ENVIRONMENT = re.compile(r"(?i)(?:.*[-_.])?(?:env|envs|environment|env_?vars|extraenv\w*)|\w+Env")
_IMAGES = ("image", "container", "container_image", "docker_image", "runtime_image", "base_image")
_COMMANDS = ("command", "entrypoint", "args", "cmd")
# Keys of a service of compose, and the options of docker run that say the same.
_COMPOSE_LISTS = {"devices": "--device", "cap_add": "--cap-add", "volumes": "--volume"}
_COMPOSE_SCALARS = {
    "network_mode": "--network",
    "privileged": "--privileged",
    "pids_limit": "--pids-limit",
}
# Texts that a shell reads, one by one if they are several.
_SCRIPTS = ("run", "script", "commands", "setup", "bash", "before_script", "after_script")
_NULLS = ("", "~", "null", "Null", "NULL")
# {name} of recipes, and $(NAME) of Kubernetes
_FIELD = re.compile(r"(?<![{$])\{(\w+)\}(?!\})|\$\((\w+)\)")


def read_yaml(text: str, found: Collected, files: FileReader | None = None) -> None:
    """Add what a file says."""
    tree = parse_yaml(text)
    if tree.problem:
        found.problem(*tree.problem)
    left = _MOST_NODES
    for document in tree.documents:
        left = _YamlFile(document, found, files, left).read()


class _YamlFile:
    def __init__(
        self, document: YamlNode, found: Collected, files: FileReader | None, left: int
    ) -> None:
        self._found, self._files, self._document = found, files, document
        self._programs = Programs(found, self._shell)
        self._left = left
        top = self._fields(document)
        self._is_compose = "services" in top
        self._is_map_of_variables = "ConfigMap" in (each.text for each in self._get(top, "kind"))
        self._defaults = {
            name: node for name, node in self._fields(top.get("defaults")).items() if node.is_scalar
        }

    def read(self) -> int:
        """Read the document, and return how many nodes may still be read of the file."""
        top = self._fields(self._document)
        if {"header", "variables"} <= top.keys():  # patchkit's own JSON
            self._environment(top["variables"], 0)
        else:
            self._visit(self._document, Place(line=self._document.line))
        return self._left

    def _shell(self, text: Value, place: Place) -> None:
        # A shell knows what is not known by its dollar.
        pieces = (
            replace(each, text=f"${{{_identifier(each.text)}}}")
            if each.why and (each.text[:1] not in "$`" or each.text.startswith("${{"))
            else each
            for each in text.pieces
        )
        variables = (place.environment or {}).items()
        script = Value(tuple(pieces))
        read_shell(script, place, self._found, files=self._files, variables=variables)

    def _get(self, fields: Mapping[str, YamlNode], name: str) -> Iterator[YamlNode]:
        if name in fields:
            yield fields[name]

    def _fields(self, node: YamlNode | None, depth: int = 0) -> dict[str, YamlNode]:
        """Return a mapping by its keys, with what ``<<`` brings; what is no mapping is empty."""
        fields: dict[str, YamlNode] = {}
        pairs = (node.pairs if node else None) or []
        for key, value in pairs:
            if key.text == "<<" and depth < 8:
                for each in value.items if value.items is not None else [value]:
                    fields = {**self._fields(each, depth + 1), **fields}
        own = {key.text: value for key, value in pairs if key.is_scalar and key.text != "<<"}
        return fields | own

    def _visit(self, node: YamlNode, place: Place) -> None:
        self._left -= 1
        if self._left < 0:
            return
        if node.pairs is not None:
            self._mapping(node, place)
        for each in node.items or ():
            self._visit(each, place)

    def _mapping(self, node: YamlNode, place: Place) -> None:
        fields = self._fields(node)
        is_unit = any(
            name in (*_IMAGES, *_COMMANDS, *_SCRIPTS) or _ENVIRONMENT.fullmatch(name)
            for name in fields
        )
        if is_unit and node is not self._document:
            place = self._programs.own_block(place, node.line)
        place = replace(
            place,
            image=self._image(fields) or place.image,
            environment=self._variables(fields) or place.environment,
        )
        if self._is_compose and "image" in fields:
            self._found.containers.append(self._container(fields, place))
        for name, value in fields.items():
            # What an action of a workflow is given; what counts where it is merged into something.
            if name == "with" or (name.startswith("x-") and self._is_compose):
                continue
            if name == "build":
                self._arguments(value)
            elif _ENVIRONMENT.fullmatch(name) or (name == "data" and self._is_map_of_variables):
                self._environment(value, place.block)
            elif name in _SCRIPTS:
                self._scripts(value, place)
            elif name not in _COMMANDS or value.pairs is not None:
                self._visit(value, place)
        self._command(fields, place)

    def _container(self, fields: Mapping[str, YamlNode], place: Place) -> ContainerOptions:
        """Return what a service of compose says of its container, as options of docker run."""
        given = [
            (option, each.text)
            for key, option in _COMPOSE_LISTS.items()
            for node in self._get(fields, key)
            for each in node.items or ()
        ]
        given += [
            (option, each.text)
            for key, option in _COMPOSE_SCALARS.items()
            for each in self._get(fields, key)
        ]
        for name, each in self._fields(fields.get("ulimits")).items():
            limit = self._fields(each).get("soft", each)
            given.append(("--ulimit", f"{name}={limit.text}"))
        return ContainerOptions(
            program="compose",
            options=tuple(given),
            line=place.block,
            block=place.block,
            # What is merged from elsewhere is not seen.
            is_whole="extends" not in fields,
        )

    def _image(self, fields: Mapping[str, YamlNode]) -> str:
        for name in _IMAGES:
            node = fields.get(name)
            inner = self._fields(node)
            if node is None:
                continue
            value = self._value(node) if node.is_scalar else Value()
            if "repository" in inner and inner["repository"].is_scalar:
                value = self._value(inner["repository"])
                if "tag" in inner:
                    value = value + known(":", node.line) + self._value(inner["tag"])
            if value.text and not re.search(r"\s", value.text):
                self._found.images.append(value.word(node.line))
                return value.text
        return ""

    def _arguments(self, node: YamlNode) -> None:
        """Read the arguments of a build, which are variables of its Dockerfile."""
        arguments = self._fields(node).get("args")
        for name, value in self._fields(arguments).items():
            if value.is_scalar:
                self._found.keep(name, self._value(value), value.line)
        for each in (arguments.items if arguments else None) or ():
            name, sign, _ = each.text.partition("=")
            if sign:
                self._found.keep(name, self._value(each).cut(len(name) + 1), each.line)

    def _environment(self, node: YamlNode, block: int, depth: int = 0) -> None:
        self._left -= 1 + len(node.pairs or ()) + len(node.items or ())
        if self._left < 0 or depth > 4:
            return
        for name, inner in self._fields(node).items():
            if not inner.is_scalar:
                self._environment(inner, inner.line, depth + 1)
            elif inner.text in _NULLS and not inner.is_quoted:
                self._found.pass_on(name, inner.line, How.MAPPING, block)
            else:
                self._found.set(name, self._value(inner), inner.line, How.MAPPING, block)
        for each in node.items or ():
            fields = self._fields(each)
            if "name" in fields and "value" in fields:
                value = self._value(fields["value"])
                self._found.set(fields["name"].text, value, each.line, How.MAPPING, block)
            elif "name" in fields:
                self._found.pass_on(fields["name"].text, each.line, How.MAPPING, block)
            elif each.is_scalar:
                place = Place(line=each.line, block=block)
                self._programs.variable(self._value(each), How.MAPPING, place)

    def _variables(self, fields: Mapping[str, YamlNode]) -> dict[str, Value]:
        """Return the variables that the commands beside them see."""
        found: dict[str, Value] = {}
        for name, node in fields.items():
            if not _ENVIRONMENT.fullmatch(name):
                continue
            found |= {key: self._value(each) for key, each in self._fields(node).items()}
            for each in node.items or ():
                key, sign, _ = each.text.partition("=")
                if sign:
                    found[key] = self._value(each).cut(len(key) + 1)
        self._left -= len(found)
        return found

    def _scripts(self, node: YamlNode, place: Place) -> None:
        for each in node.items if node.items is not None else [node]:
            if each.is_scalar:
                self._shell(self._value(each), replace(place, line=each.line))
            else:
                self._visit(each, place)

    def _command(self, fields: Mapping[str, YamlNode], place: Place) -> None:
        nodes = [
            fields[name] for name in ("entrypoint", "command", "cmd", "args") if name in fields
        ]
        nodes = [each for each in nodes if each.pairs is None and (each.items or each.text)]
        if not nodes or ("args" in fields and len(nodes) == 1 and not place.image):
            return
        entry = "entrypoint" in fields or ("command" in fields and "args" in fields)
        place = replace(place, line=nodes[0].line, is_entry=not entry)
        if len(nodes) == 1 and nodes[0].is_scalar:
            self._shell(_going_on(self._value(nodes[0])), place)
            return
        if len(nodes) == 1 and self._is_script(nodes[0]):
            self._scripts(nodes[0], replace(place, is_entry=False))
            return
        words = [word for node in nodes for word in self._words(node)]
        after = next((n for n, each in enumerate(words) if re.fullmatch(r"-\w*c", each.text)), 0)
        if after and nodes[-1].is_scalar and len(nodes) > 1:
            words = [*words[: after + 1], self._value(nodes[-1])]
        self._programs.run(words, place)

    def _is_script(self, node: YamlNode) -> bool:
        """Return whether a list is one of commands, and not one of words."""
        texts = [each.text.strip() for each in node.items or ()]
        return bool(texts) and bool(re.search(r"^[\w./-]+\s+\S", texts[0])) and texts[0][0] != "-"

    def _words(self, node: YamlNode) -> list[Value]:
        if node.is_scalar:
            return words_of(self._value(node), self._found)
        return [self._value(each) for each in node.items or () if each.is_scalar]

    def _value(self, node: YamlNode) -> Value:
        """Return a text with what is known of variables, defaults and templates in it."""
        pieces = node.value.pieces or (Piece(node.text, node.line),)
        return Value(tuple(each for piece in pieces for each in self._filled(piece)))

    def _filled(self, piece: Piece) -> Iterator[Piece]:
        start, line = 0, piece.line
        for match in TEMPLATE.finditer(piece.text):
            yield from self._expanded(piece.text[start : match.start()], line)
            line = piece.line + piece.text.count("\n", 0, match.start())
            yield Piece(match[0], line, "a template fills it in")
            start = match.end()
        yield from self._expanded(piece.text[start:], line)

    def _expanded(self, text: str, line: int) -> Iterator[Piece]:
        if self._is_compose:
            yield from interpolate(text, line, lambda _: None, self._found.default).pieces
            return
        start = 0
        for match in _FIELD.finditer(text):
            if match[1] and not self._defaults:
                continue
            yield Piece(text[start : match.start()], line)
            line += text.count("\n", start, match.start())
            yield from self._default(match, line).pieces
            start = match.end()
        yield Piece(text[start:], line)

    def _default(self, match: re.Match[str], line: int) -> Value:
        node = self._defaults.get(match[1] or "")
        if node is None:
            return unknown(match[0], line, f"{match[1] or match[2]} is filled in by who runs it")
        return known(node.text, line).as_default()


def _identifier(text: str) -> str:
    return re.sub(r"\W+", "_", text).strip("_") or "template"


def _going_on(text: Value) -> Value:
    """Return a text in which a line that begins with a dash goes on with the one above."""
    pieces: list[Piece] = []
    for piece in text.pieces:
        if piece.why:
            pieces.append(piece)
            continue
        for number, line in enumerate(piece.text.splitlines(keepends=True)):
            if pieces and line.lstrip().startswith("-") and pieces[-1].text.endswith("\n"):
                before = pieces[-1].text.rstrip().removesuffix("\\")
                pieces[-1] = replace(pieces[-1], text=f"{before} ")
            pieces.append(replace(piece, text=line, line=piece.line + number))
    return Value(tuple(pieces))
