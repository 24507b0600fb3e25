"""Read the journal of units of this node's user. Runs on the node."""

import heapq
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

from patchkit.cluster.agent.health import UnreadError, read_kernel_log
from patchkit.cluster.agent.node_troubles import own_kills
from patchkit.cluster.agent.unit_state import unit_states
from patchkit.errors import HostError
from patchkit.follow import Follow
from patchkit.foreign import read_json
from patchkit.frozen import frozen
from patchkit.records import RecordError

_LATEST = 1 << 53  # microseconds since 1970: later than any clock


@frozen
class JournalLine:
    """A line of a unit; ``time`` is in microseconds since 1970, by the node's own clock."""

    time: int
    unit: str
    text: str

    def __post_init__(self) -> None:
        if not abs(self.time) < _LATEST:
            raise RecordError(f"is {self.time}, which no clock says", "time")


NodeLine = tuple[str, JournalLine]
"""The name of a node, and a line of its journal."""


def read_units(
    units: Sequence[str],
    since: str = "",
    lines: int = 0,
    follow: bool = False,
) -> Iterator[JournalLine]:
    """Yield the journal of units, oldest first, and the kernel's kills for memory among it.

    ``since`` is as journalctl takes it, ``lines`` is how many of the newest are read, 0 for all.
    With ``follow`` new lines are waited for, and the kernel's kills are left out; without it, kills
    before the oldest line are. Raises HostError if journalctl fails, or systemd does not answer.
    """
    if follow:
        # Raises HostError without a systemd: no line would ever come.
        list(unit_states(units))

    journal = read_journal(units, since, lines, follow)
    oldest = None if follow else next(journal, None)
    if oldest is None:
        yield from journal
        return

    kernel: Sequence[str] = ()
    with suppress(UnreadError):
        kernel = read_kernel_log()
    kills = [
        JournalLine(
            time=moment,
            unit="kernel",
            text=text,
        )
        for moment, text in own_kills(kernel, os.getuid())
        if moment >= oldest.time
    ]
    yield oldest
    yield from heapq.merge(journal, kills, key=lambda line: line.time)


def read_journal(
    units: Sequence[str],
    since: str,
    lines: int = 0,
    follow: bool = False,
) -> Iterator[JournalLine]:
    """Yield the journal of units as ``read_units`` does, without the kernel's kills."""
    words = ["journalctl", "--output=json", "--quiet", "--no-pager"]
    if since:
        words.append(f"--since={since}")
    if lines:
        words.append(f"--lines={lines}")
    if follow:
        words.append("--follow")
    # Lines of a unit, or of systemd about the unit; both of this user. "+" means "or".
    for unit in units:
        for key in ("_SYSTEMD_USER_UNIT", "USER_UNIT"):
            words += [f"{key}={unit}", f"_UID={os.getuid()}", "+"]

    count = 0
    with Follow(*words[:-1], given=()) as journal:
        for text in journal:
            if line := _read_entry(text):
                count += 1
                yield line

    if journal.done.trouble:
        hint = "journalctl --user --lines=5"
        raise HostError(f"journalctl: {journal.done.trouble}", hint=hint)
    if not count:
        # Raises HostError if there is no line because there is no systemd.
        list(unit_states(units))


def _read_entry(text: str) -> JournalLine | None:
    """Return the line in an entry of `journalctl --output=json`; None for one without a unit."""
    try:
        entry = read_json(text)
        unit = str(entry.get("_SYSTEMD_USER_UNIT") or entry["USER_UNIT"])
        moment = int(entry["__REALTIME_TIMESTAMP"])
    except (ValueError, KeyError, TypeError):
        return None

    message = entry.get("MESSAGE")
    # A message that is not UTF-8 is a list of numbers; one that is too long is left out.
    if isinstance(message, list):
        octets = bytes(number & 255 for number in message if isinstance(number, int))
        message = octets.decode(errors="replace")
    return JournalLine(
        time=moment,
        unit=unit,
        text=message if isinstance(message, str) else "",
    )
