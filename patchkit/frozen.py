"""Define decorators for records, frozen dataclasses with slots, and names for types of fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")

Texts = tuple[str, ...]
"""Several texts in a field of a record."""

Fields = dict[str, Any]
"""Name → value: what JSON or TOML has, or a record."""

Values = Mapping[str, str]
"""Name → text: variables, flags, facts …"""


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(field,)
)
def frozen(cls: type[T]) -> type[T]:
    """Make a class a record: a dataclass that is frozen, has slots, and takes fields by name."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def positional(cls: type[T]) -> type[T]:
    """Make a class a record that takes its fields in order, too."""
    return dataclass(frozen=True, slots=True)(cls)


def plain_fields(record: Any) -> dict[str, Any]:
    """Return the fields of a record by name, without those that hold a class: JSON has none."""
    content = {entry.name: getattr(record, entry.name) for entry in fields(record)}
    return {
        name: value for name, value in content.items() if not isinstance(value, type)
    }
