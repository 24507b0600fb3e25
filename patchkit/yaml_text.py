"""Read YAML that others wrote, within limits: it is weighed before anything of it is built.

It is read as SafeLoader reads it: a tag makes no object of a program's, and nothing of a file runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml  # at run time where it is used: 20 ms, and for YAML alone

_DEEPEST = 64
_NODE = 40  # what a node weighs beside its characters
_HEAVIEST = 8 << 20


class YamlError(Exception):
    """A text that is no YAML, or more of it than is read: ``line`` says where, from 1."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line
        self.problem = problem


def read_nodes(text: str) -> list[yaml.Node | None]:
    """Return the root of each document; what has aliases stands in several places, as one node.

    Raises YamlError.
    """
    import yaml

    _weigh(text)
    with _errors_told(text):
        return list(yaml.compose_all(text, Loader=_loader()))


def read_value(text: str) -> Any:
    """Return what one document holds. Raises YamlError."""
    import yaml

    _weigh(text)
    with _errors_told(text):
        return yaml.load(text, Loader=_loader())  # noqa: S506 - both are safe


def _loader() -> type[yaml.CSafeLoader | yaml.SafeLoader]:
    """Return libyaml's loader where PyYAML has it: the other takes minutes for hostile texts."""
    import yaml

    loader: type[yaml.CSafeLoader | yaml.SafeLoader]
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return loader


def _weigh(text: str) -> None:
    """Raise YamlError for what is too deep, or too large once each alias is what it stands for."""
    import yaml

    weight = 0
    opened: list[tuple[str | None, int]] = []
    anchored: dict[str | None, int] = {}
    with _errors_told(text):
        for event in yaml.parse(text, Loader=_loader()):
            line = event.start_mark.line + 1
            match event:
                case yaml.CollectionStartEvent():
                    opened.append((event.anchor, weight))
                    weight += _NODE
                case yaml.CollectionEndEvent():
                    anchor, before = opened.pop()
                    anchored[anchor] = weight - before
                case yaml.ScalarEvent():
                    anchored[event.anchor] = _NODE + len(event.value)
                    weight += anchored[event.anchor]
                case yaml.AliasEvent():
                    if event.anchor not in anchored:
                        raise YamlError(line, f"*{event.anchor} is nothing before it, or itself")
                    weight += anchored[event.anchor]
            if len(opened) > _DEEPEST or weight > _HEAVIEST:
                raise YamlError(line, "too large or nested too deeply")


@contextlib.contextmanager
def _errors_told(text: str) -> Iterator[None]:
    """Raise YamlError for what PyYAML says of a text, and for values that Python does not take."""
    import yaml

    try:
        yield
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line if error.problem_mark else 0
        raise YamlError(min(line, text.count("\n")) + 1, error.problem or "odd") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(line, f"odd characters: {error.reason}") from None
    except (yaml.YAMLError, ValueError) as error:  # as a date that is none
        raise YamlError(1, str(error)) from None
