"""Define decorators for records: frozen dataclasses with slots, whose fields have an order or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


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
