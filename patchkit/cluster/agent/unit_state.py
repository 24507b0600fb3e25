"""Read the states and the journal of units of this node's user. Runs on the node."""

import heapq
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from patchkit.cluster.agent.health import UnreadError, own_kills, read_kernel_log
from patchkit.cluster.agent.node_files import run_for_user
from patchkit.cluster.ssh.ssh import TOOLS
from patchkit.errors import HostError
from patchkit.follow import Follow
from patchkit.foreign import read_json
from patchkit.frozen import Fields, Texts, frozen
from patchkit.records import RecordError, read_toml

RUNNING = ("active", "activating")
OFF = ("inactive", "failed")
"""Values of ``UnitState.active``: RUNNING if a unit runs or starts, OFF if it does not run."""

_STUCK = (
    "dead",
    "failed",
    "auto-restart",
)  # sub-states in which a unit with a job waits for another unit
# Field of a UnitState → systemd's property.
_PROPERTIES = read_toml(dict[str, str], TOOLS, key="properties")


@frozen
class UnitState:
    """The state of a unit, in systemd's words.

    ``since`` is the time of its last change, ``text`` the status line that it gave systemd.
    ``invocation`` is the id of the run, "" if there is none. A unit that cannot start before
    another unit runs is "activating" and "waiting": systemd has no word for that. ``drop_ins`` are
    files that change the unit; ``changed`` says that its file is newer than what systemd has read.
    """

    unit: str
    active: str
    sub: str
    result: str
    status: str
    restarts: int
    since: str
    invocation: str
    description: str
    text: str
    drop_ins: Texts
    changed: bool


def unit_states(units: Sequence[str]) -> Iterator[UnitState]:
    """Yield the states of units, in their order, also of units that do not exist.

    Raises HostError if systemd does not answer.
    """
    properties = ",".join(_PROPERTIES.values())
    words = ("show", f"--property={properties}", "--", *units)
    shown = run_for_user("systemctl", *words, check=True).output

    for block in shown.strip().split("\n\n"):
        yield _read_unit(block)


def _read_unit(block: str) -> UnitState:
    """Return the state of a unit from a block of lines PROPERTY=VALUE."""
    values = dict(line.partition("=")[::2] for line in block.splitlines())
    fields: Fields = {name: values.get(key, "") for name, key in _PROPERTIES.items()}

    if fields["sub"].startswith("auto-restart"):
        fields["sub"] = "auto-restart"  # systemd 254 has auto-restart-queued as well

    has_job = fields.pop("job")
    if has_job and fields["sub"] in _STUCK:
        fields.update(
            active="activating",
            sub="waiting",
            invocation="",
        )

    fields["restarts"] = int(fields["restarts"] or 0)
    fields["drop_ins"] = tuple(fields["drop_ins"].split())
    fields["changed"] = fields["changed"] == "yes"
    return UnitState(**fields)


def follow_units(units: Sequence[str]) -> Iterator[list[UnitState]]:
    """Yield the states of units now, and again at each change, without an end.

    Raises HostError if systemd does not answer.
    """
    former: list[UnitState] = []
    while True:
        states = list(unit_states(units))
        if states != former:
            yield states
            former = states
        time.sleep(0.25)


def begin_unit(unit: str) -> None:
    """Start a unit that has ended; do not wait for it. Raises HostError."""
    run_for_user("systemctl", "reset-failed", unit)
    run_for_user("systemctl", "start", "--no-block", unit, check=True)


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
