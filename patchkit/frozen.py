"""Define records: frozen dataclasses with slots, whose fields are given by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(field,)
)
def frozen(cls: type[T]) -> type[T]:
    """Return a class as a record; ``dataclasses`` takes it for any other dataclass."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)
