"""Look for troubles that stop a node's rank, or soon will: full disks, kills, a lost address.

Runs on the node, at each `status`, so it has to be fast. A source that cannot be read counts as no
trouble.
"""

from __future__ import annotations

import json
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
from patchkit.frozen import frozen
from patchkit.process import attempt

_RECENT = 3600.0  # seconds: older kills are not reported
_MOST = 3  # kills that are reported, the last ones
_KILLED = re.compile(r"^(\S{19})\S* .*Killed process (\d+) \(([^)]*)\)")
_OF_UNIT = "killed by the OOM killer"  # systemd's words about a unit
_STATE = "~/.local/state"  # the folder of what ranks compile and write


@frozen
class NodeTroubles:
    """The troubles of a node beside its units.

    ``disks`` are those of its home and of its ranks' state, full or not. ``killed`` describes the
    processes that the kernel ended for memory within an hour. ``addresses`` are the node's IPv4
    addresses; ``lost`` is the address of its rank if the node does not have it any more, else "".
    """

    disks: tuple[DiskRoom, ...] = ()
    killed: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    lost: str = ""


def look_for_troubles(settings: Mapping[str, Any]) -> NodeTroubles:
    """Return the troubles of this node; ``settings`` are those of its last start, {} for none."""
    addresses = tuple(_own_addresses())
    address = str(settings.get("address", ""))
    is_lost = bool(address and addresses) and address not in addresses

    try:
        killed = tuple(memory_kills(read_kernel_log(), time.time()))
    except UnreadError:
        # Only root and the group adm may read the log, but systemd reports kills in user units.
        killed = tuple(_unit_kills(str(settings.get("unit", ""))))

    return NodeTroubles(
        disks=tuple(disk_rooms(["~", _STATE])),
        killed=killed[-_MOST:],
        addresses=addresses,
        lost=address if is_lost else "",
    )


def memory_kills(kernel: Sequence[str], now: float) -> Iterator[str]:
    """Yield, in words, the processes that the kernel ended for memory within an hour.

    ``kernel`` are lines of its log, ``now`` is in seconds since 1970.
    """
    for line in kernel:
        if kill := _KILLED.match(line):
            clock, process, name = kill.groups()
            with suppress(ValueError):
                if now - datetime.fromisoformat(clock).timestamp() < _RECENT:
                    yield f"{name} (process {process}) at {clock.replace('T', ' ')}"


def own_kills(kernel: Sequence[str], user: int) -> Iterator[tuple[int, str]]:
    """Yield the kernel's lines about processes of the UID ``user`` that it ended for memory.

    Each line comes with its time, in microseconds since 1970.
    """
    for line in kernel:
        clock, _, text = line.partition(" ")
        if _KILLED.match(line) and re.search(rf"\bUID:{user}\b", text):
            with suppress(ValueError):
                yield round(datetime.fromisoformat(clock).timestamp() * 1e6), text


def _unit_kills(unit: str) -> Iterator[str]:
    """Yield, in words, the kills for memory in a unit, by the journal of the user's systemd."""
    words = ["--quiet", "--no-pager", "--output=short-iso", f"--since=-{_RECENT:.0f}s"]
    words += [f"_UID={os.getuid()}", f"USER_UNIT={unit}"]

    for line in attempt("journalctl", *words).output.splitlines():
        if _OF_UNIT in line:
            yield f"a process of {unit} at {line[:19].replace('T', ' ')}"


def _own_addresses() -> Iterator[str]:
    """Yield the IPv4 addresses by which other machines may reach this node."""
    words = ("ip", "-json", "-4", "address", "show", "scope", "global")
    text = attempt(*words).output

    with suppress(ValueError, TypeError, LookupError, AttributeError):
        for netdev in json.loads(text):
            for address in netdev["addr_info"]:
                yield str(address["local"])
