"""Describe the processes of a cluster's group on this node, and who holds the ports it needs."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from patchkit.runtime.on_node.unit_state import processes

_LISTENS = "0A"  # TCP_LISTEN of net/tcp_states.h, as /proc/net/tcp has it
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_WORD = 4  # bytes that the kernel prints as one number of its own byte order


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProcess:
    """A process with the group's mark; ``state`` is the kernel's letter: R, S, D, T, Z …"""

    pid: int
    name: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Who listens at a port; ``pid`` is 0 and ``name`` "" for a process of another user."""

    address: str
    port: int
    pid: int = 0
    name: str = ""


def group_processes(name: str) -> Iterator[GroupProcess]:
    """Yield the processes of a cluster's group; those that end meanwhile are left out."""
    for pid in processes(name):
        if (found := _about(pid)) is not None:
            yield GroupProcess(pid=pid, name=found[0], state=found[1])


def listeners(ports: Collection[int]) -> list[Listener]:
    """Return who listens at these TCP ports, of IPv4 and IPv6."""
    rows = [row for kind in ("tcp", "tcp6") for row in _rows(Path("/proc/net", kind), ports)]
    holders = _holders({inode for _address, _port, inode in rows}) if rows else {}
    found = []
    for address, port, inode in rows:
        pid = holders.get(inode, 0)
        about = _about(pid) if pid else None
        found.append(Listener(address=address, port=port, pid=pid, name=about[0] if about else ""))
    return found


def _about(pid: int) -> tuple[str, str] | None:
    """Return the name and the state of a process; None for one that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    # The name is in parentheses, and may hold some itself.
    before, _, after = text.rpartition(")")
    return before.partition("(")[2], after.strip()[:1]


def _rows(table: Path, ports: Collection[int]) -> Iterator[tuple[str, int, str]]:
    """Yield address, port and inode of the listening sockets of a table of the kernel's."""
    try:
        lines = table.read_text(encoding="ascii", errors="replace").splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if len(fields) < 10 or fields[3] != _LISTENS:
            continue
        place, _, number = fields[1].partition(":")
        if int(number, 16) in ports:
            yield _address(place), int(number, 16), fields[9]


def _address(text: str) -> str:
    data = bytes.fromhex(text)
    words = [data[start : start + _WORD][::-1] for start in range(0, len(data), _WORD)]
    return str(ipaddress.ip_address(b"".join(words)))


def _holders(inodes: Collection[str]) -> dict[str, int]:
    """Return inode → process, for the sockets of this user's processes."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            match = _SOCKET.fullmatch(str(entry.readlink()))
        except OSError:
            continue  # it ended, or is not ours
        if match and match[1] in inodes:
            found[match[1]] = int(entry.parts[2])
    return found
