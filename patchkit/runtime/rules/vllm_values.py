"""Read which values the variables of a vLLM take, in its ``envs.py``, without importing it.

Three things there stop a vLLM that is started with another value: choices (``env_with_choices`` and
its kin), ``int(...)`` and ``float(...)`` around what is read. A type alone (``Literal``) stops
nothing: such words are kept apart, as ``NAMED``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import SourceError
from patchkit.runtime.rules.flag_values import listed, strings
from patchkit.runtime.rules.vllm_names import parsed, readers, reads

ONE, SEVERAL, INTEGER, NUMBER, NAMED = "one of", "some of", "integer", "number", "named"
_ANY_CASE = "any case"
_CHOOSING = {"env_with_choices": ONE, "env_list_with_choices": SEVERAL}
_CHOOSING["env_set_with_choices"] = SEVERAL
_NUMBERS = {"int": INTEGER, "maybe_convert_int": INTEGER, "maybe_convert_bool": INTEGER}
_NUMBERS["float"] = NUMBER


@dataclass(frozen=True, slots=True, kw_only=True)
class Takes:
    """The values of a variable: ``how`` is one of the five words above, ``words`` its choices."""

    how: str
    words: tuple[str, ...] = ()
    any_case: bool = False

    @classmethod
    def parse(cls, text: str) -> Takes:
        """Read what ``str`` gives: ``one of: a, b`` or ``one of, any case: a, b``."""
        kind, _, words = text.partition(": ")
        how, _, case = kind.partition(", ")
        return cls(how=how, words=tuple(filter(None, words.split(", "))), any_case=bool(case))

    def __str__(self) -> str:
        case = f", {_ANY_CASE}" if self.any_case else ""
        return f"{self.how}{case}: {', '.join(self.words)}" if self.words else self.how

    def __or__(self, other: Takes) -> Takes:
        """Return what takes a value if one of the two does; the second decides how it is read."""
        words = tuple(dict.fromkeys((*self.words, *other.words)))
        return Takes(how=other.how, words=words, any_case=self.any_case or other.any_case)

    @property
    def enforced(self) -> bool:
        """Return whether vLLM stops at another value."""
        return self.how != NAMED

    @property
    def in_words(self) -> str:
        """Return what it takes, for messages."""
        if not self.words:
            return _SAID[self.how]
        if len(self.words) > _SHOWN:
            return f"{', '.join(self.words[:_SHOWN])} and {len(self.words) - _SHOWN} others"
        return ", ".join(self.words)

    def has(self, value: str) -> bool:
        """Return whether a value is taken, as ``envs.py`` decides it."""
        if self.how in _CONVERT:
            return _can_convert(_CONVERT[self.how], value)
        words = {word.lower() for word in self.words} if self.any_case else {*self.words}
        given = [value]
        if self.how == SEVERAL:
            given = list(filter(None, map(str.strip, value.split(","))))
        return all((each.lower() if self.any_case else each) in words for each in given)


_SAID = {INTEGER: "a whole number", NUMBER: "a number"}
_SHOWN = 8  # words in a message
_CONVERT: Mapping[str, Callable[[str], object]] = {INTEGER: int, NUMBER: float}


def _can_convert(convert: Callable[[str], object], value: str) -> bool:
    try:
        convert(value)
    except ValueError:
        return False
    return True


def read_values(home: Path) -> dict[str, Takes]:
    """Return name → values for the package in ``home``; names that take anything are left out.

    Raises SourceError for an ``envs.py`` that is none, or choices in a form that no release has.
    """
    place = home / "envs.py"
    tree = parsed(place)
    named = dict(_annotated_literals(tree))
    found = {}
    for name, reader in readers(place, tree).items():
        takes = next(_enforced_values(home, name, reader), named.get(name))
        if takes:
            found[name] = takes
    return found


def _annotated_literals(tree: ast.Module) -> Iterator[tuple[str, Takes]]:
    """Yield the names that ``envs.py`` annotates with ``Literal[...]``, and its words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            for part in ast.walk(node.annotation):
                if isinstance(part, ast.Subscript) and ast.unparse(part.value) == "Literal":
                    yield node.target.id, Takes(how=NAMED, words=tuple(strings(part)))


def _enforced_values(home: Path, name: str, reader: ast.expr) -> Iterator[Takes]:
    for call in _only_calls(ast.walk(reader)):
        function = call.func.id if isinstance(call.func, ast.Name) else ""
        if function in _CHOOSING and reads(call, name):
            arguments = _call_arguments(call)
            case = arguments.get("case_sensitive")
            yield Takes(
                how=_CHOOSING[function],
                words=_choice_words(home, arguments["choices"]),
                any_case=isinstance(case, ast.Constant) and not case.value,
            )
        elif function in _NUMBERS and call.args and _is_read(call.args[0], name):
            yield Takes(how=_NUMBERS[function])


def _only_calls(nodes: Iterable[ast.AST]) -> Iterator[ast.Call]:
    return (node for node in nodes if isinstance(node, ast.Call))


def _call_arguments(call: ast.Call) -> dict[str, ast.expr]:
    order = ("env_name", "default", "choices", "case_sensitive")
    named = {each.arg: each.value for each in call.keywords if each.arg}
    return dict(zip(order, call.args, strict=False)) | named


def _is_read(node: ast.expr, name: str) -> bool:
    """Return whether an expression is ``os.getenv(NAME)``, ``os.environ[NAME]`` or the like."""
    if isinstance(node, ast.Call):
        return reads(node, name)
    return isinstance(node, ast.Subscript) and ast.unparse(node) == f"os.environ[{name!r}]"


def _choice_words(home: Path, choices: ast.expr) -> tuple[str, ...]:
    """Return a list of words, or the members of a class elsewhere in the package."""
    if isinstance(choices, ast.List):
        return tuple(strings(choices))
    for node in ast.walk(choices):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
            call = node.value
            if ast.unparse(call.func) == "__import__" and isinstance(call.args[0], ast.Constant):
                module = str(call.args[0].value).split(".")
                place = home.joinpath(*module[1:]).with_suffix(".py")
                if words := tuple(listed(parsed(place), node.attr)):
                    return words
    raise SourceError(
        f"{home / 'envs.py'}:{choices.lineno}: choices in an unknown form",
        why="this vLLM is newer than any release that patchkit knows",
        hint="name a release with --vllm, for example --vllm 0.25.1",
    )
