"""Read YAML that others wrote, within limits of size and depth.

The limits are checked before any object is built. As with PyYAML's SafeLoader, tags make no objects
of Python classes, and no code of a file runs. The parser is libyaml, since PyYAML's own takes
minutes for hostile texts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import yaml  # at run time it is imported where it is used, since loading takes 20 ms

_DEEPEST = 64  # levels of nested collections
_NODE = 40  # weight of a node in addition to its characters
_HEAVIEST = 8 << 20


@dataclass(slots=True)
class _Weight:
    """The weight of a node: a number that stands for its size in memory, with aliases expanded.

    ``depth`` is the number of levels of collections in it.
    """

    weight: int
    depth: int = 0
    anchor: str | None = None


class YamlError(Exception):
    """A text is not YAML, or is too large or nested too deeply. ``line`` counts from 1."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line
        self.problem = problem


def read_nodes(text: str) -> list[yaml.Node | None]:
    """Return the root node of each document in a text. Raises YamlError.

    A node that has aliases is the same object in several places.
    """
    import yaml

    _weigh(text)
    with _translate_errors(text):
        return list(yaml.compose_all(text, Loader=yaml.CSafeLoader))


def _weigh(text: str) -> None:
    """Raise YamlError if a text is nested too deeply, or too large with its aliases expanded."""
    import yaml

    root = _Weight(0)
    opened = [root]
    anchored: dict[str | None, _Weight] = {}
    with _translate_errors(text):
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            line = event.start_mark.line + 1
            node: _Weight | None = None
            match event:
                case yaml.CollectionStartEvent():
                    opened.append(_Weight(_NODE, 1, event.anchor))
                case yaml.CollectionEndEvent():
                    node = opened.pop()
                    anchored[node.anchor] = node
                case yaml.ScalarEvent():
                    node = _Weight(_NODE + len(event.value))
                    anchored[event.anchor] = node
                case yaml.AliasEvent():
                    if event.anchor not in anchored:
                        problem = f"*{event.anchor} is nothing before it, or itself"
                        raise YamlError(line, problem)
                    node = anchored[event.anchor]

            if node:
                opened[-1].weight += node.weight
                opened[-1].depth = max(opened[-1].depth, node.depth + 1)

            # The root is no level, and the innermost open collection is in both numbers.
            levels = len(opened) + opened[-1].depth - 2
            if levels > _DEEPEST or opened[-1].weight > _HEAVIEST:
                raise YamlError(line, "too large or nested too deeply")


@contextlib.contextmanager
def _translate_errors(text: str) -> Iterator[None]:
    """Turn errors of PyYAML into YamlError."""
    import yaml

    try:
        yield
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line if error.problem_mark else 0
        last_line = text.count("\n")
        raise YamlError(min(line, last_line) + 1, error.problem or "odd") from None
    except yaml.reader.ReaderError as error:
        # The position counts bytes of UTF-8.
        line = text.encode().count(b"\n", 0, error.position) + 1
        raise YamlError(line, f"odd characters: {error.reason}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise YamlError(1, str(error)) from None
