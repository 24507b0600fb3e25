"""Say what a signature of a wheelhouse covers: which wheelhouse, counter, date, and three digests.

``SHA256SUMS.signed`` is text that ``sha256sum --check`` accepts::

    # patchkit wheelhouse, signed, format 1
    # wheelhouse: 5f2c0a9be17d4c36
    # counter: 2
    # date: 2026-11-22T04:30:00Z
    0c4e…  SHA256SUMS
    77aa…  manifest.json
    b01d…  requirements.txt

The wheelhouse is named by 16 random hex digits, drawn by its first signature; they and the counter
let a verifier notice an older state, wherever the folder lies.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from patchkit.errors import HashMismatchError, UsageError
from patchkit.wheel.wheelhouse.manifest import MANIFEST, REQUIREMENTS, SUMS
from patchkit.wheel.wheelhouse.own_files import read_own

STATEMENT = f"{SUMS}.signed"
_DOCUMENTS = (SUMS, MANIFEST, REQUIREMENTS)
_DATE = "%Y-%m-%dT%H:%M:%SZ"
_FIRST = "# patchkit wheelhouse, signed, format 1"
_TEXT = re.compile(
    re.escape(_FIRST) + r"\n# wheelhouse: (?P<wheelhouse>[0-9a-f]{16})"
    r"\n# counter: (?P<counter>[1-9][0-9]{0,8})"
    r"\n# date: (?P<date>[0-9]{4}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-5][0-9]Z)\n"
    + "".join(rf"(?P<s{n}>[0-9a-f]{{64}})  {re.escape(d)}\n" for n, d in enumerate(_DOCUMENTS))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """The signed text. ``date`` is UTC as ``2026-11-22T04:30:00Z``; ``sums`` are sha256 in hex."""

    wheelhouse: str
    counter: int
    date: str
    sums: Mapping[str, str]

    @property
    def text(self) -> str:
        head = (f"wheelhouse: {self.wheelhouse}", f"counter: {self.counter}", f"date: {self.date}")
        rows = (f"{self.sums[name]}  {name}" for name in _DOCUMENTS)
        return "\n".join([_FIRST, *(f"# {line}" for line in head), *rows, ""])

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def fields(self) -> dict[str, object]:
        return {"wheelhouse": self.wheelhouse, "counter": self.counter, "date": self.date}

    def changed(self, house: Path) -> list[str]:
        """Return the names of documents that were changed since. Raises as ``read_own``."""
        now = digests(house)
        return [name for name in _DOCUMENTS if now[name] != self.sums[name]]


def read_statement(data: bytes) -> Statement:
    """Parse a statement. Raises HashMismatchError unless it is one, byte for byte."""
    found = _TEXT.fullmatch(data.decode(errors="replace"))
    if not found:
        raise HashMismatchError(
            f"{STATEMENT}: is not what patchkit signs",
            why="it was edited, or a newer patchkit wrote it",
            hint=f"get it again from where it was signed; to begin anew, remove {STATEMENT} first",
        )
    return Statement(
        wheelhouse=found["wheelhouse"],
        counter=int(found["counter"]),
        date=found["date"],
        sums={name: found[f"s{number}"] for number, name in enumerate(_DOCUMENTS)},
    )


def digests(house: Path) -> dict[str, str]:
    """Return the sha256 of each document, "" for a missing one. Raises as ``read_own``."""
    found = {name: read_own(house / name) for name in _DOCUMENTS}
    return {
        name: "" if data is None else hashlib.sha256(data).hexdigest()
        for name, data in found.items()
    }


def utc(seconds: float) -> str:
    """Return a time since 1970 as statements write it. Raises ValueError, OverflowError."""
    return datetime.fromtimestamp(seconds, UTC).strftime(_DATE)


def signing_date() -> str:
    """Return the date of SOURCE_DATE_EPOCH if it is set, else of now. Raises UsageError."""
    said = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        return utc(int(said) if said else time.time())
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"SOURCE_DATE_EPOCH={said!r}: is not a time", hint="unset it, or give seconds"
        ) from None


def require_newer(statement: Statement, limit: str) -> None:
    """Check against a counter (``3``) or a date (``2026-11-01``, UTC) that is still too old.

    Raises HashMismatchError if the statement is not newer, UsageError for another limit.
    """
    if limit.isascii() and limit.isdigit():
        # Cut, since int() refuses thousands of digits; a counter has at most nine.
        newer = statement.counter > int(limit[:20])
    else:
        # Both are UTC in one format, so their order as text is that in time.
        newer = statement.date > _date(limit)
    if not newer:
        raise HashMismatchError(
            f"{STATEMENT}: has counter {statement.counter} of {statement.date}, "
            f"which is not newer than {limit}",
            why="this is an older state of the wheelhouse",
            hint="get the newer one from where it is signed",
        )


def _date(text: str) -> str:
    try:
        found = datetime.fromisoformat(text)
        at = found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
        return at.strftime(_DATE)
    except (ValueError, OverflowError):
        raise UsageError(
            f"--newer-than takes a counter or a date, not {text!r}",
            hint="--newer-than 3, or --newer-than 2026-11-01",
        ) from None
