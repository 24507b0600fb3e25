"""What is wrong with a wheel, or between wheels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from patchkit.errors import PatchkitError


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something wrong with a file, why it matters, what to do, and the exit code of its kind."""

    filename: str
    what: str
    hint: str
    exit_code: int
    why: str = ""

    def fields(self) -> dict[str, Any]:
        return {
            "filename": self.filename,
            "what": self.what,
            "why": self.why or None,
            "next": self.hint,
            "exit_code": self.exit_code,
        }


def finding(
    kind: type[PatchkitError], filename: str, what: str, hint: str, why: str = ""
) -> Finding:
    """A finding with the exit code of that kind of error."""
    return Finding(filename=filename, what=what, why=why, hint=hint, exit_code=kind.exit_code)
