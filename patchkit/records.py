"""Read TOML and JSON as frozen dataclasses, with every key and every type checked.

The class is the description: a field without a default has to be there, a key that is no field is
refused, and a value is taken only if it is of the field's type. Types are ``str``, ``int``,
``float``, ``bool``, ``None``, unions of them, ``Literal``, enums by value, other dataclasses,
``tuple``, ``frozenset`` and ``Mapping`` of these, and classes that are made of a text, such as
``Version``. ``Annotated[str, check]`` calls the check, which raises ValueError, and so may
``__post_init__``. ``field(metadata={"key": …})`` is for a field with another name in the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from patchkit.errors import PatchkitError, UsageError

T = TypeVar("T")
_Read = Callable[[Any], Any]
_SHOWN = 60  # characters of a value that is refused
_WORDS: dict[type, str] = {str: "a text", int: "a whole number", float: "a number", bool: "a bool"}


class RecordError(ValueError):
    """A value that does not fit; ``keys`` lead to it from the top, names and numbers."""

    def __init__(self, what: str, *keys: str | int) -> None:
        super().__init__(what)
        self.what = what
        self.keys = keys

    def __str__(self) -> str:
        """Return ``rule[3].when: is 5, not a text``; entries of lists count from 1."""
        shown = "".join(f"[{k + 1}]" if isinstance(k, int) else f".{k[:_SHOWN]}" for k in self.keys)
        return f"{shown.removeprefix('.')}: {self.what}" if shown else self.what


def record(kind: type[T], value: object) -> T:
    """Return a value, as ``json`` or ``tomllib`` gives it, as what it has to be.

    Raises RecordError. ``kind`` is a dataclass, or another of the types above.
    """
    try:
        found: T = _reader_of(cast("Any", kind))(value)
    except RecursionError:
        raise RecordError("is nested too deeply") from None
    return found


def read_json(kind: type[T], text: str | bytes) -> T:
    """Return what a text in JSON holds. Raises RecordError, also for what is no JSON."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise RecordError("is nested too deeply") from None
    except ValueError as error:
        raise RecordError(f"is not JSON: {error}") from None
    return record(kind, value)


def read_toml(
    kind: type[T], path: Path, error: type[PatchkitError] = UsageError, *, key: str = ""
) -> T:
    """Return what a TOML file of patchkit's own holds; others' files are read within limits.

    With ``key`` that is one table of the file, whose others have readers of their own. Raises
    ``error``, naming the file and the key.
    """
    try:
        table = _parse_toml(path.read_text(encoding="utf-8"))
        if key and key not in table:
            raise RecordError("is missing")
        return record(kind, table[key] if key else table)
    except RecordError as wrong:
        what = RecordError(wrong.what, *((key, *wrong.keys) if key else wrong.keys))
    except ValueError as wrong:  # TOMLDecodeError, which a launcher does not import
        what = RecordError(f"is not TOML: {wrong}")
    raise error(
        f"{path}: {what}",
        why="the file was edited, or it is of another version of patchkit",
        hint="correct it there; or install patchkit again",
    )


# A file of several tables is read once for each `key`.
@lru_cache(maxsize=8)
def _parse_toml(text: str) -> dict[str, Any]:
    import tomllib  # a launcher reads none

    return tomllib.loads(text)


def matching(pattern: str, what: str) -> Callable[[str], None]:
    """Return a check for ``Annotated``: the whole text has this form, which ``what`` names."""
    form = re.compile(pattern)

    def check(text: str) -> None:
        if not form.fullmatch(text):
            raise RecordError(f"is {_show_value(text)}, not {what}")

    return check


Sha256 = Annotated[str, matching("[0-9a-f]{64}", "a sha256")]


def _require_utf8(text: str) -> None:
    if any("\ud800" <= each <= "\udfff" for each in text):
        raise RecordError(f"is {_show_value(text)}, which holds half a surrogate pair")


Utf8 = Annotated[str, _require_utf8]
"""A text that can be written: JSON can name half a surrogate pair."""


def one_of(*values: str) -> Callable[[str], None]:
    """Return a check for ``Annotated``: the text is one of these, which are known at run time."""

    def check(text: str) -> None:
        if text not in values:
            raise RecordError(f"is {_show_value(text)}, not one of {', '.join(values)}")

    return check


@cache
def _reader_of(kind: Any) -> _Read:
    """Return the function that checks values of a type; made once, since tables are long."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (Any, object):
        return lambda value: value
    if origin is Annotated:
        return _checked_reader(_reader_of(arguments[0]), arguments[1:])
    if origin in (Union, UnionType):
        return _any_of(arguments)
    if origin is Literal:
        return _member_reader({each: each for each in arguments})
    if origin in (tuple, frozenset, list):
        return _list_reader(origin, arguments)
    if origin in (dict, Mapping):
        return _table_reader(_reader_of(arguments[0]), _reader_of(arguments[1]))
    if is_dataclass(kind):
        return _dataclass_reader(kind)
    if origin is type:
        return _refuse_class
    if issubclass(kind, Enum):
        return _member_reader({each.value: each for each in kind})
    return _scalar_reader(kind) if kind in (*_WORDS, NoneType) else _made_of_text(kind)


def _refuse_class(value: Any) -> Any:
    raise RecordError(f"is {_show_value(value)}, where data names no class")


def _scalar_reader(kind: type) -> _Read:
    allowed = (int, float) if kind is float else (kind,)

    def read(value: Any) -> Any:
        if type(value) not in allowed:  # to Python True is a number
            raise RecordError(f"is {_show_value(value)}, not {_WORDS.get(kind, 'null')}")
        return value

    return read


def _made_of_text(kind: type) -> _Read:
    text = _reader_of(str)

    def read(value: Any) -> Any:
        try:
            return kind(text(value))
        except RecordError:
            raise
        except ValueError:
            raise RecordError(f"is {_show_value(value)}, not a {kind.__name__}") from None

    return read


def _member_reader(members: Mapping[Any, Any]) -> _Read:
    def read(value: Any) -> Any:
        # Lists and tables cannot be looked up in a dict, and True would be found as 1.
        if isinstance(value, str | int) and not isinstance(value, bool) and value in members:
            return members[value]
        raise RecordError(f"is {_show_value(value)}, not one of {', '.join(map(str, members))}")

    return read


def _checked_reader(inner: _Read, checks: tuple[Any, ...]) -> _Read:
    def read(value: Any) -> Any:
        found = inner(value)
        for check in checks:
            _call_checked(check, found)
        return found

    return read


def _call_checked(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    try:
        return function(*arguments, **named)
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(str(error)) from None


def _any_of(kinds: tuple[Any, ...]) -> _Read:
    readers = [_reader_of(kind) for kind in kinds if kind is not NoneType]
    optional = NoneType in kinds

    def read(value: Any) -> Any:
        if value is None and optional:
            return None
        # The last type of a union has its say on errors, so it is tried outside of the loop.
        for reader in readers[:-1]:
            try:
                return reader(value)
            except RecordError:
                continue
        return readers[-1](value)

    return read


def _list_reader(kind: Callable[[Any], Any], arguments: tuple[Any, ...]) -> _Read:
    """Read ``tuple[X, ...]``, ``frozenset[X]``, ``list[X]`` of any length; ``tuple[X, Y]``."""
    long = kind is not tuple or arguments[1:] == (...,)
    readers = [_reader_of(each) for each in (arguments[:1] if long else arguments)]

    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise RecordError(f"is {_show_value(value)}, not a list")
        if not long and len(value) != len(readers):
            raise RecordError(f"has {len(value)} entries, not {len(readers)}")
        pairs = ((n, readers[0 if long else n], each) for n, each in enumerate(value))
        return kind(_read_below(*pair) for pair in pairs)

    return read


def _table_reader(key: _Read, inner: _Read) -> _Read:
    def read(value: Any) -> Any:
        rows = _require_table(value).items()
        return {
            _read_below(str(name), key, name): _read_below(str(name), inner, each)
            for name, each in rows
        }

    return read


def _read_below(key: str | int, reader: _Read, value: Any) -> Any:
    """Read a part of a value, and name it in the error."""
    try:
        return reader(value)
    except RecordError as error:
        raise RecordError(error.what, key, *error.keys) from None


def _require_table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecordError(f"is {_show_value(value)}, not a table")
    return value


def _dataclass_reader(kind: Any) -> _Read:
    # With extras, since Annotated holds the checks.
    hints = get_type_hints(kind, include_extras=True)
    known = {each.metadata.get("key", each.name): each for each in fields(kind) if each.init}
    readers = {key: (each.name, _reader_of(hints[each.name])) for key, each in known.items()}
    needed = {
        key
        for key, each in known.items()
        if each.default is MISSING and each.default_factory is MISSING
    }

    def read(value: Any) -> Any:
        table = _require_table(value)
        # An unknown key first: a misspelt one is missing as well, and this says which it is.
        for key in table:
            if key not in readers:
                raise RecordError(f"unknown key; known are {', '.join(readers)}", key)
        for key in sorted(needed - table.keys()):
            raise RecordError(f"lacks the key {key!r}")
        rows = ((readers[key], key, each) for key, each in table.items())
        return _call_checked(
            kind, **{name: _read_below(key, reader, each) for (name, reader), key, each in rows}
        )

    return read


def _show_value(value: object) -> str:
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
