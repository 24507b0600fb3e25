"""End this node's rank as soon as less memory is left than the floor: the guard's own process.

The guard forks it and tells it the rank's control groups, which it opens as soon as they are there.
It has its memory locked, and at each look it reads two open files into the same bytes: whoever
opens a file, starts a program or looks at a process may wait until the kernel finds memory for it.

This file is copied to the nodes, beside group.py.
"""

import ctypes
import gc
import mmap
import os
import re
import select
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

GIB = 1 << 20  # in KiB, as /proc/meminfo counts
_FASTEST = 16 * GIB  # KiB that are taken in a second at most: a GB10 writes no more
_PAUSES = (0.02, 0.5)  # seconds between two looks at the memory: the least and the most
_LOCK_ALL = 3  # MCL_CURRENT | MCL_FUTURE of <sys/mman.h>
_LEFT = re.compile(rb"MemAvailable: +(\d+)")
_SWAP = re.compile(rb"SwapTotal: +[1-9]")
# Microseconds in which all processes waited for memory.
_WAITED = re.compile(rb"full .*total=(\d+)")
# With swap MemAvailable falls too late. On user-mode Linux all processes waited 2 % of the time
# while swap filled, and 58 % once it was full, when MemAvailable was far above the floor; beside
# calm loads that swapped, below 5 %. Waiting beyond this share adds up: 2 s without a break end the
# rank.
_STALL_SHARE = 0.2
_LONGEST_STALL = 1.5  # seconds beyond the share: the rank ends, and no more are counted
_PRESSURE = "/proc/pressure/memory"
_MOST_REFUSED = 9  # processes that the guard is told
_DOCKER = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
# In the path of a container's control group.
_DOCKER_GROUP = re.compile(r"docker[-/]([0-9a-f]{64})")
_KILL = (
    b"POST /containers/%s/kill HTTP/1.1\r\nHost: docker\r\nContent-Length: 0\r\n\r\n"
)
MEMBERS = "cgroup.procs"
"""The file of a control group that lists its processes."""


class MemoryLeft(NamedTuple):
    """The memory that is left, in KiB, and whether swap keeps all processes waiting."""

    left: int
    is_stalled: bool


class MemoryReader:
    """The files that tell the memory of this machine, open, and how long all processes waited."""

    def __init__(self) -> None:
        self._meminfo = os.open("/proc/meminfo", os.O_RDONLY)
        self._meminfo_text = bytearray(mmap.PAGESIZE)

        self._pressure_text = bytearray(mmap.PAGESIZE)
        self._pressure = os.memfd_create("none")
        with suppress(OSError):  # a kernel without it, or with psi=0
            pressure = os.open(_PRESSURE, os.O_RDONLY)
            os.pread(pressure, 1, 0)
            self._pressure = pressure

        self._pressure_at = 0.0  # seconds since the boot
        self._waited = 0.0
        self._stall = 0.0

    def read(self) -> MemoryLeft:
        """Return the memory of this machine now."""
        os.preadv(self._meminfo, [self._meminfo_text], 0)
        left = _LEFT.search(self._meminfo_text)
        assert left

        os.preadv(self._pressure, [self._pressure_text], 0)
        if waited := _WAITED.search(self._pressure_text):
            self._add_stall(int(waited[1]) / 1e6)

        has_stalled = self._stall >= _LONGEST_STALL
        is_stalled = has_stalled and bool(_SWAP.search(self._meminfo_text))
        return MemoryLeft(int(left[1]), is_stalled)

    def _add_stall(self, waited: float) -> None:
        """Count the seconds in which all processes waited, beyond ``_STALL_SHARE`` of the time.

        ``waited`` is their sum since the boot. While the share is smaller, the count falls.
        """
        now = time.monotonic()
        allowance = _STALL_SHARE * (now - self._pressure_at)
        stall = self._stall + waited - self._waited - allowance
        self._stall = min(max(stall, 0.0), _LONGEST_STALL)

        self._pressure_at = now
        self._waited = waited


@dataclass
class RankGroup:
    """A control group of the rank.

    ``members`` is the open list of its processes; ``kill`` its open file that ends them, -1 where
    only root may write that, as for docker's containers, whose processes are the user's.
    ``ended`` is None until it is ended, then whether by ``kill``; None again once memory is enough.
    ``refused`` are processes that live, since this user may not end them.
    """

    members: int
    kill: int
    ended: bool | None = None
    refused: list[int] = field(default_factory=list)

    def read_members(self) -> list[int]:
        """Return the processes of the group, the first ones of many; none if it is gone."""
        with suppress(OSError):
            return [*map(int, os.pread(self.members, mmap.PAGESIZE, 0).split())]
        return []

    def end(self) -> bool:
        """End all processes; return whether by ``kill``, so that none can be left."""
        with suppress(OSError):  # it is -1, or the group is gone
            os.write(self.kill, b"1")
            return True

        self.refused = []
        for member in self.read_members():
            try:
                os.kill(member, signal.SIGKILL)
            except PermissionError:
                self.refused.append(member)
            except OSError:  # it ended
                continue
        return False


def open_group(path: Path) -> RankGroup:
    """Open the files of a control group. Raises OSError."""
    members = os.open(path / MEMBERS, os.O_RDONLY)
    kill = -1
    with suppress(OSError):  # it is root's, or Linux is older than 5.14
        kill = os.open(path / "cgroup.kill", os.O_WRONLY)
    return RankGroup(members, kill)


class Trigger:
    """The process that ends the rank; ``channel`` leads to the guard."""

    def __init__(self, floor: float, mark: float, channel: socket.socket) -> None:
        self.floor = floor  # KiB: below it the rank ends
        self.mark = mark  # and below this one if all processes wait
        # Stays when a load lowers ``mark``: with so many KiB, ended groups count as new.
        self._enough = mark
        self._channel = channel
        self._reader = MemoryReader()
        self._docker = socket.socket(socket.AF_UNIX)
        self._request = b""  # to docker, to kill the rank's container; empty for none
        self._groups: list[RankGroup] = []

    def run(self) -> NoReturn:
        """Look at the memory, and act, as long as the guard lives."""
        lock_memory()
        gc.disable()

        while True:
            pause = self.look()
            if select.select([self._channel], [], [], pause)[0]:
                self.receive()

    def receive(self) -> None:
        """Take a group or a mark from the guard, or end with it. Groups that are gone stay."""
        text = os.fsdecode(self._channel.recv(mmap.PAGESIZE))
        if not text:
            os._exit(0)

        if text.isdecimal():
            self.mark = int(text)
            return

        if container := _DOCKER_GROUP.search(text):
            self._request = _KILL % container[1].encode()
        with suppress(OSError):  # it is gone
            self._groups.append(open_group(Path(text)))

    def look(self) -> float:
        """End the rank if too little memory is left; return the seconds until the next look."""
        memory = self._reader.read()
        if memory.left < (self.mark if memory.is_stalled else self.floor):
            self._end_rank(memory)
        elif memory.left >= self._enough:
            # A process that hangs in the kernel keeps its group: the next start may run in it.
            for group in self._groups:
                group.ended = None

        if self._request and memory.left >= self.mark:
            self._connect_docker()

        # The time in which the fastest load would reach the floor, within ``_PAUSES``.
        least, most = _PAUSES
        return min(max((memory.left - self.floor) / _FASTEST, least), most)

    def _connect_docker(self) -> None:
        """Connect to docker's daemon, anew once it closed the connection or answered on it."""
        # A socket that is not connected yet, or no longer, also counts as readable.
        if select.select([self._docker], [], [], 0)[0]:
            self._docker.close()

            self._docker = socket.socket(socket.AF_UNIX)
            self._docker.setblocking(False)

            with suppress(OSError):  # it does not run, or DOCKER_HOST is no socket
                self._docker.connect(_DOCKER.removeprefix("unix://"))

    def _end_rank(self, memory: MemoryLeft) -> None:
        """Kill the rank, and tell the guard the first time; later calls kill the rest of the rank.

        A group that ``kill`` ended is left alone: the unit's ExecStopPost= runs in it. The first
        time, docker is asked to end a container with processes that this user may not kill.
        """
        living = [group for group in self._groups if group.read_members()]

        is_new = any(group.ended is None for group in living)
        for group in living:
            group.ended = group.ended or group.end()

        if is_new:
            refused = [pid for group in living for pid in group.refused]
            if refused:
                with suppress(OSError):  # there is no connection
                    self._docker.send(self._request)

            figures = (*memory, *refused[:_MOST_REFUSED])
            with suppress(OSError):  # the guard ended
                self._channel.send(b" ".join(b"%d" % figure for figure in figures))


def start_trigger(floor: float, mark: float) -> socket.socket:
    """Fork the process that ends the rank; return the socket that leads to it."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        near.close()
        try:
            Trigger(floor, mark, far).run()
        except (AssertionError, OSError) as error:  # the guard says it
            far.send(f"{type(error).__name__}: {error}".encode()[: mmap.PAGESIZE])
        finally:
            os._exit(1)

    far.close()
    return near


def lock_memory() -> None:
    """Lock the memory of this process, or say that not all of it could be locked.

    Where the user may not lock all of it, code comes first: without swap nothing else is taken.
    """
    library = ctypes.CDLL(None)
    if library.mlockall(_LOCK_ALL) == 0:
        return

    rows = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    for row in sorted(rows, key=lambda row: " r-xp " not in row):
        begin, end = row.split()[0].split("-")
        address = int(begin, 16)
        size = int(end, 16) - address

        if " ---p " not in row:
            library.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size))

    # Past the buffer of Python, which ends with the process.
    os.write(1, b"not all of the guard's memory is locked, by LimitMEMLOCK\n")
