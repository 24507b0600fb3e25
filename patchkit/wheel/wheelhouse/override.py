"""State an override: a version in the place of the one that a wheel pins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from packaging.version import Version

from patchkit.records import RecordError, matching
from patchkit.versions import ExactPin

USER = "the user"
_MOST = 300  # characters of a reason


def one_line(text: str) -> None:
    """Raise ValueError for a text that is too long, or is not shown as it is written."""
    if not text.isprintable() or not 0 < len(text) <= _MOST:
        raise RecordError(f"is not one line of up to {_MOST} characters that can be shown")


_Line = Annotated[str, one_line]
_Release = Annotated[str, matching(r"[A-Za-z0-9._-]+ [A-Za-z0-9.+!]+", "a project and its version")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """What is taken, and the pin that it replaces.

    ``by`` is who has the pin, ``torch 2.11.0``; ``word`` on whose word it is replaced: ``the
    user``, or a known bug and where it was reported.
    """

    takes: ExactPin
    pin: ExactPin
    by: _Release
    reason: _Line
    word: _Line

    def __post_init__(self) -> None:
        if self.takes.project != self.pin.project or self.takes.version <= self.pin.version:
            raise RecordError(f"{self.takes} is no later version of {self.pin}")

    def __str__(self) -> str:
        return f"{self.summary}: {self.reason} ({self.word})"

    @property
    def summary(self) -> str:
        """Return both pins and who has the old one, in ASCII."""
        return f"{self.takes} in the place of {self.pin.version}, which {self.by} pins"

    def is_met_by(self, version: Version) -> bool:
        """Check whether a wheel of this version is what is taken; a build of it has a label."""
        return Version(version.public) == self.takes.version

    def fields(self) -> dict[str, str]:
        return {
            "takes": str(self.takes),
            "pin": str(self.pin),
            "by": self.by,
            "reason": self.reason,
            "word": self.word,
        }
