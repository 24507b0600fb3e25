"""Look at the processes of this machine: which cluster has them, and which listen at a port.

This file is copied to the nodes, beside group.py.
"""

import ipaddress
import mmap
import os
import re
import socket
import subprocess
import urllib.parse
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "PATCHKIT_CLUSTER"
"""The environment variable of every process of a group; its value is the cluster's name.

By it patchkit finds processes that are left after a stop.
"""

_PROCESS = re.compile(r'users:\(\("(.*?)",pid=(\d+)')
# In a line of `ss -e`: the name of a process, which may be any text, is before it and shorter.
_USER = re.compile(r" uid:(\d+) ino:\d+ sk:")


def run_tool(
    *words: str, seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program. Raises OSError if it is missing, TimeoutExpired after ``seconds``."""
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=seconds,
    )


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this machine; ``state`` is the kernel's letter: R, S, D, T, Z …

    ``user`` is its UID, ``size`` its resident memory in KiB, ``parent`` the PID of its parent.
    """

    pid: int
    name: str
    state: str
    user: int = 0
    size: int = 0
    parent: int = 0


def read_processes() -> Iterator[Process]:
    """Yield all processes of this machine."""
    for folder in Path("/proc").glob("[0-9]*"):
        # It ended, even while it was read.
        with suppress(OSError, ValueError, IndexError):
            with (folder / "stat").open("rb", buffering=0) as file:
                text = file.read(mmap.PAGESIZE)
                user = os.fstat(file.fileno()).st_uid

            # "(NAME) STATE ...": a name may have parentheses in it.
            name, _, fields = text.partition(b"(")[2].rpartition(b") ")
            state, *numbers = fields.decode().split()
            yield Process(
                pid=int(folder.name),
                name=name.decode(errors="replace"),
                state=state,
                user=user,
                size=int(numbers[20]) * mmap.PAGESIZE >> 10,
                parent=int(numbers[0]),
            )


def read_mark(pid: int) -> str:
    """Return the name of the cluster that a process belongs to, "" for none.

    A process of another user counts as none.
    """
    with suppress(OSError):  # it ended, or belongs to another user
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        variables = dict(entry.partition(b"=")[::2] for entry in entries)
        return variables.get(MARK.encode(), b"").decode(errors="replace")
    return ""


def strangers(
    url: str,
    unit: str,
    name: str = "",
) -> list[str]:
    """Return, in words, the listeners at a server's URL that do not belong to the server.

    Those of the unit ``unit`` belong to it. So do processes with the mark of the cluster ``name``:
    in a container the control group is the engine's.
    """
    descriptions = []
    for listener in listeners_at(url):
        cluster = read_mark(listener.pid)
        if (name and cluster == name) or is_in_unit(listener.pid, unit):
            continue

        text = f"{listener.address} port {listener.port}: {listener.holder}"
        if cluster:
            text += f" of the cluster {cluster}"
        descriptions.append(text)
    return descriptions


def is_in_unit(pid: int, unit: str) -> bool:
    """Return whether a process is in the control group of a unit."""
    with suppress(OSError):  # it ended
        path = Path(f"/proc/{pid}/cgroup").read_text(errors="replace")
        return unit in re.split("[/\n]", path)
    return False


@dataclass(frozen=True)
class Listener:
    """A listener at a TCP port; ``user`` is its UID, ``pid`` is 0 for a process of another user."""

    address: str
    port: int
    pid: int
    name: str
    user: int = 0

    @property
    def holder(self) -> str:
        """Return the listening process in words."""
        if self.pid:
            return f"{self.name} (process {self.pid})"
        return "another user's process"


def listeners_at(url: str) -> list[Listener]:
    """Return the listeners that a request to a URL of this machine may reach; [] without ss."""
    parts = urllib.parse.urlsplit(url)
    addresses = {"0.0.0.0", "::"}  # noqa: S104 - they listen at all addresses
    with suppress(OSError):  # the host is unknown
        rows = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
        for *_row, address in rows:
            addresses.add(_plain_address(str(address[0])))

    try:
        listeners = list(find_listeners([parts.port or 80]))
    except OSError:
        return []

    return [listener for listener in listeners if listener.address in addresses]


def find_listeners(ports: Collection[int]) -> Iterator[Listener]:
    """Yield the listeners at these TCP ports, of IPv4 and IPv6. Raises OSError without ss."""
    for line in run_tool("ss", "-Hltnpe").stdout.splitlines():
        address, _, port = line.split()[3].rpartition(":")
        if not (port.isdigit() and int(port) in ports):
            continue

        process = _PROCESS.search(line)
        user = _USER.search(line)  # ss leaves it out for root
        yield Listener(
            address=_plain_address(address),
            port=int(port),
            pid=int(process[2]) if process else 0,
            name=process[1] if process else "",
            user=int(user[1]) if user else 0,
        )


def _plain_address(text: str) -> str:
    """Return an address in one spelling: without a device, and as IPv4 if IPv6 only maps it.

    A listener at ``::ffff:127.0.0.1`` gets what is sent to 127.0.0.1.
    """
    bare = text.partition("%")[0].strip("[]")
    bare = bare.replace("*", "::")

    with suppress(ValueError):
        address = ipaddress.ip_address(bare)
        return str(getattr(address, "ipv4_mapped", None) or address)
    return bare
