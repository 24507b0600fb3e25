"""Read TOML and JSON as frozen dataclasses, with every key and every type checked.

The class describes the file: a field without a default is required, an unknown key is refused, and
a value must have the type of its field. A type may be ``str``, ``int``, ``float``, ``bool``,
``None``, a union, a ``Literal``, an enum (by value), another dataclass, a ``tuple``, ``frozenset``
or ``Mapping`` of these, or a class that is made from a text, such as ``Version``. For
``Annotated[str, check]``, ``check`` is called with the value. It and ``__post_init__`` refuse a
value by raising ValueError or PatchkitError. ``field(metadata={"key": …})`` gives a field another
name in the file.
"""

import json
import re
from collections.abc import Callable, Mapping
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

from patchkit import foreign
from patchkit.errors import PatchkitError, UsageError

# In a checkout, recipes is a link to the folder beside the package; in a wheel, it is a folder.
RECIPES = Path(__file__).resolve().parent / "recipes"
RECIPES_VARIABLE = "PATCHKIT_RECIPES"
"""The variable that names folders of recipes outside the package, separated as in PATH."""

T = TypeVar("T")
_Read = Callable[[Any], Any]
_SHOWN = 60  # characters of a refused value that an error shows
_WORDS: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "a bool",
}


class RecordError(ValueError):
    """A value that does not fit. ``keys`` (names, and numbers in lists) lead to it from the top."""

    def __init__(self, what: str, *keys: str | int) -> None:
        super().__init__(what)
        self.what = what
        self.keys = keys

    def __str__(self) -> str:
        """Return the error as ``rule[3].when: is 5, not a text``; entries of lists count from 1."""
        path = ""
        for key in self.keys:
            path += f"[{key + 1}]" if isinstance(key, int) else f".{key[:_SHOWN]}"
        return f"{path.removeprefix('.')}: {self.what}" if path else self.what


def record(kind: type[T], value: object) -> T:
    """Return a value that ``json`` or ``tomllib`` read as an object of the type ``kind``.

    The docstring of this module lists the types. Raises RecordError if the value does not fit.
    """
    try:
        read = _reader_of(cast("Any", kind))
        return cast("T", read(value))
    except RecursionError:
        raise RecordError("is nested too deeply") from None


def read_json(kind: type[T], text: str | bytes) -> T:
    """Return a JSON text as ``kind``. Raises RecordError if it is not JSON or does not fit."""
    try:
        value = foreign.read_json(text)
    except ValueError as error:
        raise RecordError(f"is not JSON: {error}") from None
    return record(kind, value)


def read_toml(
    kind: type[T],
    path: Path,
    error: type[PatchkitError] = UsageError,
    *,
    key: str = "",
    hint: str = "correct it there; or install patchkit again",
) -> T:
    """Return a TOML file of patchkit's own as ``kind``; ``read_user_toml`` is for files of users.

    With ``key``, only this table of the file is read and checked. Raises ``error``, naming the file
    and the key, if the file cannot be read or does not fit.
    """
    try:
        tables = _parse_toml(path.read_text(encoding="utf-8"))
        if not key:
            return record(kind, tables)
        if key not in tables:
            raise RecordError("is missing", key)
        table: T = _read_below(key, partial(record, kind), tables[key])
        return table
    except RecordError as wrong:
        problem = wrong
    except ValueError as wrong:  # TOMLDecodeError, whose module may not be loaded
        problem = RecordError(f"is not TOML: {wrong}")

    raise error(
        f"{path}: {problem}",
        why="the file was edited, or it is of another version of patchkit",
        hint=hint,
    )


def read_user_toml(kind: type[T], path: Path) -> T:
    """Return a TOML file that a user writes as ``kind``. Raises UsageError."""
    return read_toml(kind, path, hint=f"correct {path}")


def read_tsv(path: Path) -> list[list[str]]:
    """Return the cells of a table, row by row; a line that begins with # is a comment."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if line and line[0] != "#"]


def _fields_by_key(kind: type) -> dict[str, Any]:
    """Return key in a file → field for the fields of a dataclass."""
    settable = (field for field in fields(kind) if field.init)
    return {field.metadata.get("key", field.name): field for field in settable}


# Cached, since a file with several tables is read once for each `key`.
@lru_cache(maxsize=8)
def _parse_toml(text: str) -> dict[str, Any]:
    import tomllib  # imported here, since some programs that import this module read no TOML

    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def matching(pattern: str, what: str) -> Callable[[str], None]:
    """Return a check for ``Annotated``: the pattern must match the whole text.

    ``what`` names the form in errors, such as ``a sha256``.
    """
    form = re.compile(pattern)

    def check(text: str) -> None:
        if not form.fullmatch(text):
            raise RecordError(f"is {_show_value(text)}, not {what}")

    return check


Sha256 = Annotated[str, matching("[0-9a-f]{64}", "a sha256")]
Utf8 = Annotated[
    str, matching("[^\ud800-\udfff]*", "a text without half a surrogate pair")
]
"""A text that UTF-8 can hold, without half a surrogate pair, which JSON can contain."""


def one_of(*values: str) -> Callable[[str], None]:
    """Return a check for ``Annotated``: the text must be one of ``values``."""
    return partial(_read_member, dict.fromkeys(values))


@cache
def _reader_of(kind: Any) -> _Read:
    """Return the function that checks and converts values of a type."""
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is None:
        return _plain_reader(kind)

    if origin is Annotated:
        return partial(_read_checked, _reader_of(arguments[0]), arguments[1:])
    if origin in (Union, UnionType):
        kinds = sorted(arguments, key=lambda kind: kind is not NoneType)
        return partial(_read_any_of, [*map(_reader_of, kinds)])

    if origin in (tuple, frozenset, list):
        is_open = origin is not tuple or ... in arguments
        return partial(_read_list, origin, is_open, [*map(_reader_of, arguments)])
    if origin in (dict, Mapping):
        return partial(_read_table, *map(_reader_of, arguments))
    if origin is Literal:
        return partial(_read_member, dict(zip(arguments, arguments, strict=True)))
    return partial(_read_member, {})  # type[…]: refused, since data names no class


def _plain_reader(kind: Any) -> _Read:
    """Return the function that checks and converts values of a type without parameters."""
    if kind in (Any, object, ...):
        return lambda value: value
    if is_dataclass(kind):
        return _dataclass_reader(kind)
    if issubclass(kind, Enum):
        return partial(_read_member, {member.value: member for member in kind})
    return partial(_read_scalar, kind)


def _read_scalar(kind: Any, value: Any) -> Any:
    """Return a scalar, or the object of a class that is made from a text."""
    scalar = kind if kind in (*_WORDS, NoneType) else str
    # isinstance would take True for an int.
    is_right = type(value) is scalar or (scalar is float and type(value) is int)
    if not is_right:
        raise RecordError(f"is {_show_value(value)}, not {_WORDS.get(scalar, 'null')}")
    if scalar is kind:
        return value

    try:
        return kind(value)
    except RecordError:
        raise
    except ValueError:
        raise RecordError(f"is {_show_value(value)}, not a {kind.__name__}") from None


def _read_member(members: Mapping[Any, Any], value: Any) -> Any:
    # A list cannot be looked up in a dict, and True would equal 1.
    is_scalar = isinstance(value, str | int) and not isinstance(value, bool)
    if is_scalar and value in members:
        return members[value]
    names = ", ".join(map(str, members))
    raise RecordError(f"is {_show_value(value)}, not one of {names}")


def _read_checked(read: _Read, checks: tuple[Any, ...], value: Any) -> Any:
    content = read(value)
    for check in checks:
        _call_check(check, content)
    return content


def _call_check(check: Callable[..., T], /, *arguments: Any, **fields: Any) -> T:
    """Call a check or a class; turn its ValueError or PatchkitError into a RecordError."""
    try:
        return check(*arguments, **fields)
    except RecordError:
        raise
    except (ValueError, PatchkitError) as error:
        raise RecordError(getattr(error, "what", str(error))) from None


def _read_any_of(readers: list[_Read], value: Any) -> Any:
    # The last type is read outside of the loop, so that its error is raised.
    for read in readers[:-1]:
        with suppress(RecordError):
            return read(value)
    return readers[-1](value)


def _read_list(
    make: Callable[[Any], Any],
    of_any_length: bool,
    readers: list[_Read],
    value: Any,
) -> Any:
    if not isinstance(value, list):
        raise RecordError(f"is {_show_value(value)}, not a list")
    if of_any_length:
        readers = readers[:1] * len(value)
    if len(value) != len(readers):
        raise RecordError(f"has {len(value)} entries, not {len(readers)}")
    pairs = enumerate(zip(readers, value, strict=True))
    return make(_read_below(number, read, entry) for number, (read, entry) in pairs)


def _read_table(key: _Read, inner: _Read, value: Any) -> Any:
    if not isinstance(value, dict):
        raise RecordError(f"is {_show_value(value)}, not a table")
    table = {}
    for name, content in value.items():
        place = str(name)
        table[_read_below(place, key, name)] = _read_below(place, inner, content)
    return table


def _read_below(key: str | int, read: _Read, value: Any) -> Any:
    """Read the part of a value at ``key``, and put the key in front of those of a RecordError."""
    try:
        return read(value)
    except RecordError as error:
        raise RecordError(error.what, key, *error.keys) from None


def _dataclass_reader(kind: Any) -> _Read:
    # With include_extras, since the checks are in Annotated.
    hints = get_type_hints(kind, include_extras=True)
    by_key = _fields_by_key(kind)
    readers = {key: _reader_of(hints[field.name]) for key, field in by_key.items()}
    needed = {
        key
        for key, field in by_key.items()
        if field.default is MISSING and field.default_factory is MISSING
    }

    def read(value: Any) -> Any:
        """Return a table as the dataclass."""
        if not isinstance(value, dict):
            raise RecordError(f"is {_show_value(value)}, not a table")

        # Unknown keys come first: a misspelt key is also a missing key, and the error about the
        # unknown key shows how it was spelt.
        for key in value:
            if key not in by_key:
                raise RecordError(f"unknown key; known are {', '.join(by_key)}", key)
        for key in sorted(needed - value.keys()):
            raise RecordError(f"lacks the key {key!r}")

        content = {}
        for key, part in value.items():
            content[by_key[key].name] = _read_below(key, readers[key], part)
        return _call_check(kind, **content)

    return read


def _show_value(value: object) -> str:
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    is_word = value is None or isinstance(value, bool)
    text = json.dumps(value) if is_word else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
