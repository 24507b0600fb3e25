"""Look for troubles that stop a node's rank, or soon will: full disks, kills, a lost address.

Runs on the node, at each `status`, so it has to be fast. A source that cannot be read counts as no
trouble.
"""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from patchkit.cluster.agent.health import (
    DiskRoom,
    UnreadError,
    disk_rooms,
    read_kernel_log,
)
from patchkit.frozen import Texts, frozen
from patchkit.process import attempt

_RECENT = 3600.0  # seconds: older kills are not reported
_MOST = 3  # kills that are reported, the last ones
_KILLED = re.compile(r"^(\S{19})\S* .*Killed process (\d+) \(([^)]*)\)")
# Words of the user's systemd about a unit. The kernel's log says nothing of systemd-oomd.
_BY_KERNEL = "killed by the OOM killer"
_BY_OOMD = "systemd-oomd killed"
_STATE = "~/.local/state"  # the folder of what ranks compile and write


@frozen
class NodeTroubles:
    """The troubles of a node beside its units.

    ``disks`` are those of its home and of its ranks' state, full or not. ``killed`` describes the
    processes that the kernel or systemd-oomd ended for memory within an hour. ``addresses`` are the
    node's IPv4 addresses; ``lost`` is the address of its rank if the node does not have it any
    more, else "".
    """

    disks: tuple[DiskRoom, ...]
    killed: Texts
    addresses: Texts
    lost: str


def look_for_troubles(settings: Mapping[str, Any]) -> NodeTroubles:
    """Return the troubles of this node; ``settings`` are those of its last start, {} for none."""
    addresses = _own_addresses()
    lost = str(settings.get("address", ""))
    if not addresses or lost in addresses:
        lost = ""

    unit = str(settings.get("unit", ""))
    killed = list(_unit_kills(unit, _BY_OOMD))
    try:
        killed += memory_kills(read_kernel_log(), time.time())
    except UnreadError:
        # Only root and the group adm may read the log, but systemd reports kills in user units.
        killed += _unit_kills(unit, _BY_KERNEL)

    return NodeTroubles(
        disks=tuple(disk_rooms(["~", _STATE])),
        killed=tuple(killed[-_MOST:]),
        addresses=tuple(addresses),
        lost=lost,
    )


def memory_kills(kernel: Sequence[str], now: float) -> Iterator[str]:
    """Yield, in words, the processes that the kernel ended for memory within an hour.

    ``kernel`` are lines of its log, ``now`` is in seconds since 1970.
    """
    for moment, kill in _read_kills(kernel):
        if now - moment < _RECENT:
            clock, process, name = kill.groups()
            yield f"{name} (process {process}) at {clock.replace('T', ' ')}"


def own_kills(kernel: Sequence[str], user: int) -> Iterator[tuple[int, str]]:
    """Yield the kernel's lines about processes of the UID ``user`` that it ended for memory.

    Each line comes with its time, in microseconds since 1970.
    """
    for moment, kill in _read_kills(kernel):
        if re.search(rf"\bUID:{user}\b", kill.string):
            yield round(moment * 1e6), kill.string.partition(" ")[2]


def _read_kills(kernel: Sequence[str]) -> Iterator[tuple[float, re.Match[str]]]:
    """Yield the lines about processes that the kernel ended for memory, with their times."""
    for line in kernel:
        with suppress(ValueError):
            if kill := _KILLED.match(line):
                clock = line.partition(" ")[0]
                yield datetime.fromisoformat(clock).timestamp(), kill


def _unit_kills(unit: str, text: str) -> Iterator[str]:
    """Yield, in words, the kills in a unit that the user's systemd told in lines with ``text``."""
    words = ["--quiet", "--no-pager", "--output=short-iso", f"--since=-{_RECENT:.0f}s"]
    words += [f"_UID={os.getuid()}", f"USER_UNIT={unit}"]

    for line in attempt("journalctl", *words).output.splitlines():
        if text in line:
            yield f"a process of {unit} at {line[:19].replace('T', ' ')}"


def _own_addresses() -> list[str]:
    """Return the IPv4 addresses by which other machines may reach this node."""
    words = ("ip", "-oneline", "-4", "address", "show", "scope", "global")
    return re.findall(r" inet ([\d.]+)", attempt(*words).output)
