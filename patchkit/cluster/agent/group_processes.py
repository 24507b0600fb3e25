"""Describe the processes of a cluster's group on this node, and who holds the ports it needs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from patchkit.cluster.agent.group_script import holding, listening
from patchkit.cluster.agent.unit_state import processes


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
    rows = list(listening(ports))
    holders = holding({inode for *_, inode in rows})
    found = []
    for address, port, _user, inode in rows:
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
