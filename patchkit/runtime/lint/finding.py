"""What `patchkit env check` finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class Severity(StrEnum):
    """``error``: it does not do what it says. ``warning``: likely harmful. ``note``: no effect."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing about one line. ``name`` is the variable, empty where it is about none."""

    line: int
    name: str
    severity: Severity
    what: str
    why: str = ""
    next: str = ""
    source: str = ""

    def fields(self) -> dict[str, str | int]:
        return asdict(self)
