"""Read what the ranks on this node wrote, from its journal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from patchkit.follow import Follow
from patchkit.records import RecordError

_LATEST = 1 << 53


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalLine:
    """A line of a unit; ``time`` is in microseconds since 1970, by the node's own clock."""

    time: int
    unit: str
    text: str

    def __post_init__(self) -> None:
        if not abs(self.time) < _LATEST:
            raise RecordError(f"is {self.time}, which no clock says", "time")


def read_units(
    units: Sequence[str], since: str = "", lines: int = 0, follow: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the journal of units of this user, oldest first: on the node.

    ``since`` is as journalctl takes it, ``lines`` how many of the newest, 0 for all.
    """
    words = ["journalctl", "--output=json", "--quiet", "--no-pager"]
    words += [f"--since={since}"] if since else []
    words += [f"--lines={lines}"] if lines else []
    words += ["--follow"] if follow else []
    for number, unit in enumerate(units):
        words += ["+"] * (number > 0) + _of(unit)
    with Follow(*words, given=()) as talk:
        for line in talk:
            try:
                entry = json.loads(line)
                unit = entry.get("_SYSTEMD_USER_UNIT") or entry["USER_UNIT"]
                time = int(entry["__REALTIME_TIMESTAMP"])
            except (ValueError, KeyError, TypeError):
                continue  # not an entry of a unit
            yield {"time": time, "unit": str(unit), "text": _decode_message(entry.get("MESSAGE"))}


def _of(unit: str) -> list[str]:
    """Return what selects a unit's own lines, or systemd's about it."""
    mine = f"_UID={os.getuid()}"
    return [f"_SYSTEMD_USER_UNIT={unit}", mine, "+", f"USER_UNIT={unit}", mine]


def _decode_message(message: object) -> str:
    # journald gives what is no UTF-8 as a list of bytes, and of a line that is too long nothing.
    if isinstance(message, list):
        return bytes(each & 255 for each in message if isinstance(each, int)).decode(
            errors="replace"
        )
    return message if isinstance(message, str) else ""
