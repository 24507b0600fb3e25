"""Parse YAML, and JSON with it, within limits, with the line of each node.

The tree is built of libyaml's events: depth and size are bounded, an alias is the node itself, and
what stands before an error is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from patchkit.runtime.files.value import Piece, Value

_DEEPEST = 64
_MOST_EVENTS = 400_000
# Stands for {{ … }} of Helm and Jinja while the rest is parsed.
_OPEN, _CLOSE = "\u27e6", "\u27e7"
TEMPLATE = re.compile(rf"{_OPEN}[^{_CLOSE}]*{_CLOSE}|\$?\{{\{{[^{{}}]*\}}\}}")
"""A place in a text that a template fills in."""


@dataclass(slots=True)
class YamlNode:
    """A scalar with its text and its lines in the file, a list, or a mapping with its pairs."""

    line: int
    text: str = ""
    value: Value = field(default_factory=Value)
    is_quoted: bool = False
    items: list[YamlNode] | None = None
    pairs: list[tuple[YamlNode, YamlNode]] | None = None

    @property
    def is_scalar(self) -> bool:
        return self.items is None and self.pairs is None


@dataclass(slots=True)
class YamlTree:
    """The documents of a file; ``problem`` is what ended the reading, and its line."""

    documents: list[YamlNode] = field(default_factory=list)
    problem: tuple[int, str] | None = None


def parse_yaml(text: str) -> YamlTree:
    """Return the tree of a text; of a template with its places held open."""
    tree = _parse(text)
    if tree.problem and ("{{" in text or "{%" in text):
        return _parse(_without_template(text))
    return tree


def _without_template(text: str) -> str:
    """Return a text of the same lines, in which no directive of a template is left."""
    text = re.sub(r"\{#.*?#\}|\{\{-?\s*/\*.*?\*/\s*-?\}\}", _breaks, text, flags=re.DOTALL)
    text = re.sub(r"(?m)^[ \t]*(?:\{\{[^\n]*\}\}|\{%[^\n]*%\})[ \t]*$", "", text)
    text = re.sub(r"\{%[^\n]*?%\}", "", text)
    return re.sub(r"\{\{([^\n{}]*)\}\}", _held_open, text)


def _held_open(match: re.Match[str]) -> str:
    # Without quotes: they may stand in a text that is quoted itself.
    return _OPEN + re.sub(r"[\"'\\]", "", match[1]).strip(" -") + _CLOSE


def _breaks(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def _parse(text: str) -> YamlTree:
    import yaml  # 20 ms, and for `env check` alone

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    builder = _Builder(text.split("\n"))
    try:
        for number, event in enumerate(yaml.parse(text, Loader=loader)):
            if number > _MOST_EVENTS or len(builder.open) > _DEEPEST:
                line = event.start_mark.line + 1
                builder.tree.problem = (line, "YAML that is too large or nested too deeply")
                break
            builder.add(type(event).__name__, event)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = str(getattr(error, "problem", None) or "not YAML")
        line = min(mark.line + 1, text.count("\n") + 1) if mark else 1
        builder.tree.problem = (line, f"the rest, which is no YAML: {what}")
    except ValueError:  # characters that YAML does not know
        builder.tree.problem = (1, "the file, which is no YAML")
    return builder.tree


class _Builder:
    def __init__(self, lines: list[str]) -> None:
        self.tree = YamlTree()
        self.open: list[YamlNode] = []
        self._keys: list[YamlNode | None] = []
        self._anchors: dict[str, YamlNode] = {}
        self._lines = lines

    def add(self, kind: str, event: object) -> None:
        """Add one event of the parser."""
        line = event.start_mark.line + 1  # type: ignore[attr-defined]
        anchor: str = getattr(event, "anchor", None) or ""
        if kind == "AliasEvent":
            self._place(self._anchors.get(anchor) or YamlNode(line))
        elif kind == "ScalarEvent":
            text, quoted = event.value, bool(event.style)  # type: ignore[attr-defined]
            node = YamlNode(line, text, self._scalar(event), quoted)
            self._begin(node, anchor)
        elif kind in ("SequenceStartEvent", "MappingStartEvent"):
            is_list = kind == "SequenceStartEvent"
            node = YamlNode(line, items=[]) if is_list else YamlNode(line, pairs=[])
            self._begin(node, anchor)
            self.open.append(node)
            self._keys.append(None)
        elif kind in ("SequenceEndEvent", "MappingEndEvent"):
            self.open.pop()
            self._keys.pop()

    def _begin(self, node: YamlNode, anchor: str) -> None:
        if anchor:
            self._anchors[anchor] = node
        self._place(node)

    def _place(self, node: YamlNode) -> None:
        if not self.open:
            self.tree.documents.append(node)
        elif self.open[-1].items is not None:
            self.open[-1].items.append(node)
        elif (key := self._keys[-1]) is None:
            self._keys[-1] = node
        else:
            pairs = self.open[-1].pairs
            assert pairs is not None
            pairs.append((key, node))
            self._keys[-1] = None

    def _scalar(self, event: object) -> Value:
        """Return the text of a scalar with the lines that it has in the file."""
        style, text = event.style, event.value  # type: ignore[attr-defined]
        start, end = event.start_mark, event.end_mark  # type: ignore[attr-defined]
        if style == "|":
            return Value((Piece(text, start.line + 2),))
        if style == ">":
            return Value(tuple(_folded(self._lines[start.line + 1 : end.line], start.line + 2)))
        if not style and end.line > start.line and "#" not in text:
            first = self._lines[start.line][start.column :]
            rest = self._lines[start.line + 1 : end.line + 1]
            if end.column:
                rest = [*rest[:-1], rest[-1][: end.column]] if rest else rest
            return Value(tuple(_folded([first, *(each.lstrip() for each in rest)], start.line + 1)))
        # Of other texts only the first line is sure: an escape may stand for a line break.
        parts = text.splitlines(keepends=True) or [""]
        return Value(tuple(Piece(each, start.line + 1) for each in parts))


def _folded(lines: list[str], number: int) -> Iterator[Piece]:
    """Yield the lines of a text that YAML joins with blanks."""
    indents = [len(each) - len(each.lstrip()) for each in lines if each.strip()]
    indent = min(indents, default=0)
    for position, line in enumerate(lines):
        text = line[indent:].rstrip()
        following = lines[position + 1 : position + 2]
        kept = not text or text[0] in " \t" or not following or not following[0][indent:].strip()
        # A backslash at the end is meant to go on, as in a shell.
        text = text if kept else text.removesuffix("\\").rstrip() + " "
        yield Piece(text + ("\n" if kept else ""), number + position)
