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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, lru_cache, partial
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

# In a checkout a link to the folder beside the package; in a wheel the folder itself.
RECIPES = Path(__file__).resolve().parent / "recipes"
T = TypeVar("T")
_Read = Callable[[Any], Any]
_SHOWN = 60  # characters of a value that is refused
_WORDS: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "a bool",
}


class RecordError(ValueError):
    """A value that does not fit; ``keys`` lead to it from the top, names and numbers."""

    def __init__(self, what: str, *keys: str | int) -> None:
        super().__init__(what)
        self.what = what
        self.keys = keys

    def __str__(self) -> str:
        """Return ``rule[3].when: is 5, not a text``; entries of lists count from 1."""
        shown = "".join(
            f"[{k + 1}]" if isinstance(k, int) else f".{k[:_SHOWN]}" for k in self.keys
        )
        return f"{shown.removeprefix('.')}: {self.what}" if shown else self.what


class UnknownKeyError(RecordError):
    """A key that its table does not have; the last one of ``keys``."""


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
    ``error``, naming the file and the key. One that a user writes: ``read_user_toml``.
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


def read_user_toml(kind: type[T], path: Path) -> T:
    """Return what a TOML file holds that a user writes.

    Raises UsageError, naming the key, its line, and the table that an unknown key belongs to.
    """
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        return record(kind, _parse_toml(text))
    except RecordError as wrong:
        line = find_key_line(text, wrong.keys)
        what = str(wrong)
        places = _tables_with(kind, wrong)
    except ValueError as wrong:  # TOMLDecodeError, UnicodeDecodeError
        number = re.search(r"at line (\d+)", str(wrong))
        line = int(number[1]) if number else 0
        what = f"is not TOML: {wrong}"
        places = []

    where = f"{path}:{line}" if line else f"{path}"
    correct = f"correct line {line} of {path}" if line else f"correct {path}"
    if places:
        correct = f"move it into {' or '.join(places)}"
    raise UsageError(f"{where}: {what}", hint=correct)


_TOML_KEY = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
_TOML_HEADER = re.compile(rf"\s*(\[\[?)\s*({_TOML_KEY}(?:\s*\.\s*{_TOML_KEY})*)\s*\]")
_TOML_PAIR = re.compile(rf"\s*({_TOML_KEY}(?:\s*\.\s*{_TOML_KEY})*)\s*=")


def find_key_line(text: str, keys: Sequence[str | int]) -> int:
    """Return the line of a TOML text where a key stands, or what is nearest above it; or 0."""
    wanted = tuple(key for key in keys if isinstance(key, str))
    entry = next((key for key in keys if isinstance(key, int)), 0)
    nearest = 0
    depth = 0
    for number, place, table_entry in _toml_places(text):
        is_above = place == wanted[: len(place)] and table_entry in (entry, None)
        if is_above and len(place) > depth:
            nearest = number
            depth = len(place)
    return nearest


def _toml_places(text: str) -> Iterator[tuple[int, tuple[str, ...], int | None]]:
    """Yield each line of a header or a key, with its names from the top.

    The last is which entry of an array of tables it stands in, None outside of one.
    """
    entries: Counter[tuple[str, ...]] = Counter()
    table: tuple[str, ...] = ()
    entry: int | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _TOML_HEADER.match(line):
            table = _toml_names(header[2])
            entry = entries[table] if header[1] == "[[" else None
            entries[table] += 1
            yield number, table, entry
        elif pair := _TOML_PAIR.match(line):
            yield number, (*table, *_toml_names(pair[1])), entry


def _toml_names(dotted: str) -> tuple[str, ...]:
    return tuple(name.strip("\"'") for name in re.findall(_TOML_KEY, dotted))


def _tables_with(kind: type, wrong: RecordError) -> list[str]:
    """Return the tables of a file to which a key belongs that is unknown where it stands."""
    if not isinstance(wrong, UnknownKeyError):
        return []
    key = wrong.keys[-1]
    places = ["the lines above the first table"] if key in _known_keys(kind) else []
    for name, hint in get_type_hints(kind).items():
        several = get_args(hint)[:1] if get_origin(hint) is tuple else ()
        inner = several[0] if several else hint
        if is_dataclass(inner) and key in _known_keys(cast("type", inner)):
            places.append(f"[[{name}]]" if several else f"[{name}]")
    return places


def _known_keys(kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass by their keys in a file."""
    return {
        each.metadata.get("key", each.name): each for each in fields(kind) if each.init
    }


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
Utf8 = Annotated[
    str, matching("[^\ud800-\udfff]*", "a text without half a surrogate pair")
]
"""A text that can be written: JSON can name half a surrogate pair."""


def one_of(*values: str) -> Callable[[str], None]:
    """Return a check for ``Annotated``: the text is one of these, which are known at run time."""
    return partial(_read_member, dict.fromkeys(values))


@cache
def _reader_of(kind: Any) -> _Read:
    """Return the function that checks values of a type; made once, since tables are long."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (Any, object, ...):
        return lambda value: value
    if origin is Annotated:
        return partial(_read_checked, _reader_of(arguments[0]), arguments[1:])
    if origin in (Union, UnionType):
        kinds = sorted(arguments, key=lambda each: each is not NoneType)
        return partial(_read_any_of, [*map(_reader_of, kinds)])
    if origin in (tuple, frozenset, list):
        entries = [*map(_reader_of, arguments)]
        return partial(
            _read_list, origin, origin is not tuple or ... in arguments, entries
        )
    if origin in (dict, Mapping):
        return partial(_read_table, *map(_reader_of, arguments))
    if is_dataclass(kind):
        return _dataclass_reader(kind)
    if origin in (Literal, type):  # data names no class
        return partial(
            _read_member, {each: each for each in arguments if origin is Literal}
        )
    if issubclass(kind, Enum):
        return partial(_read_member, {each.value: each for each in kind})
    return partial(_read_scalar, kind)


def _read_scalar(kind: Any, value: Any) -> Any:
    """Return a word, or what is made of a text."""
    its = kind if kind in (*_WORDS, NoneType) else str
    # Not isinstance: to Python True is a number.
    if type(value) is not its and (its is not float or type(value) is not int):
        raise RecordError(f"is {_show_value(value)}, not {_WORDS.get(its, 'null')}")
    try:
        return value if its is kind else kind(value)
    except RecordError:
        raise
    except ValueError:
        raise RecordError(f"is {_show_value(value)}, not a {kind.__name__}") from None


def _read_member(members: Mapping[Any, Any], value: Any) -> Any:
    # Lists and tables cannot be looked up in a dict, and True would be found as 1.
    if (
        isinstance(value, str | int)
        and not isinstance(value, bool)
        and value in members
    ):
        return members[value]
    raise RecordError(
        f"is {_show_value(value)}, not one of {', '.join(map(str, members))}"
    )


def _read_checked(read: _Read, checks: tuple[Any, ...], value: Any) -> Any:
    found = read(value)
    try:
        for check in checks:
            check(found)
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(str(error)) from None
    return found


def _read_any_of(readers: list[_Read], value: Any) -> Any:
    # The last type of a union has its say on errors, so it is tried outside of the loop.
    for read in readers[:-1]:
        with suppress(RecordError):
            return read(value)
    return readers[-1](value)


def _read_list(
    make: Callable[[Any], Any], of_any_length: bool, readers: list[_Read], value: Any
) -> Any:
    if not isinstance(value, list):
        raise RecordError(f"is {_show_value(value)}, not a list")
    if of_any_length:
        readers = readers[:1] * len(value)
    if len(value) != len(readers):
        raise RecordError(f"has {len(value)} entries, not {len(readers)}")
    return make(_read_below(n, readers[n], each) for n, each in enumerate(value))


def _read_table(key: _Read, inner: _Read, value: Any) -> Any:
    if not isinstance(value, dict):
        raise RecordError(f"is {_show_value(value)}, not a table")
    return {
        _read_below(str(name), key, name): _read_below(str(name), inner, each)
        for name, each in value.items()
    }


def _read_below(key: str | int, read: _Read, value: Any) -> Any:
    """Read a part of a value, and name it in the error."""
    try:
        return read(value)
    except RecordError as error:
        raise type(error)(error.what, key, *error.keys) from None


def _dataclass_reader(kind: Any) -> _Read:
    # With extras, since Annotated holds the checks.
    hints = get_type_hints(kind, include_extras=True)
    known = _known_keys(kind)
    readers = {
        key: (each.name, _reader_of(hints[each.name])) for key, each in known.items()
    }
    needed = {
        key
        for key, each in known.items()
        if each.default is MISSING and each.default_factory is MISSING
    }

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise RecordError(f"is {_show_value(value)}, not a table")
        # An unknown key first: a misspelt one is missing as well, and this says which it is.
        for key in value:
            if key not in known:
                raise UnknownKeyError(f"unknown key; known are {', '.join(known)}", key)
        for key in sorted(needed - value.keys()):
            raise RecordError(f"lacks the key {key!r}")
        rows = ((*readers[key], key, each) for key, each in value.items())
        values = {
            name: _read_below(key, reader, each) for name, reader, key, each in rows
        }
        try:
            return kind(**values)
        except RecordError:
            raise
        except ValueError as error:  # of __post_init__
            raise RecordError(str(error)) from None

    return read


def _show_value(value: object) -> str:
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    text = (
        json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    )
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
