"""End this node's rank before its memory is used up: the unit beside the rank runs this script.

    memory.py guard     kill the rank as soon as less memory is left than the floor

CPU and GPU of some devices share one memory. When it is used up, the kernel's own killer comes too
late, since the memory of a GPU belongs to no process. So this script keeps open what it reads and
writes, has its memory locked, starts no process, and writes to the disk in a thread of its own.

This file is copied to the nodes, beside group.py, memory_record.py and what both import.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import functools
import gc
import math
import mmap
import os
import pwd
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from patchkit.cluster.agent.group_script import (
    Settings,
    main,
    notify,
    read_missing,
    say,
)
from patchkit.cluster.agent.memory_record import (
    BOOT,
    MemoryStop,
    encode_stop,
    open_record,
    put_record,
    record_path,
    recorded_boots,
)
from patchkit.cluster.agent.processes import Process, read_mark, read_processes

_GIB = 1 << 20  # in KiB, as /proc/meminfo counts
_FASTEST = 16 * _GIB  # KiB that are taken in a second at most: a GB10 writes no more
_PAUSES = (0.02, 0.5)  # seconds between two looks at the memory: the least and the most
_SECOND = 1.0  # between two looks at processes and groups while little is left
_SELDOM = 10.0  # seconds between them otherwise, and between two lines for the status
_LOCK_ALL = 3  # MCL_CURRENT | MCL_FUTURE of <sys/mman.h>
_WARM = 12  # looks: as many as are kept
_LINES = 60  # of figures
_BOOTS = 8  # of which figures are kept
_STACK = 1 << 18  # bytes of the thread's stack, which is locked as well
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
# Not in the home, which nodes may share: ranks of one cluster that wait for each other hang.
_TURN = "/run/user"
_GROUPS = Path("/sys/fs/cgroup")
_CONTAINER = re.compile("docker|libpod")  # in the path of a container's group
_TRIES = 10  # to read the mark of a new group
_LONGEST_WAIT = 600.0  # seconds until a rank starts though memory is missing
_NOTHING = 100 << 10  # KiB: less growth explains nothing


def guard(settings: Settings) -> None:
    """Kill this node's rank whenever less than ``floor`` GiB are left, until a signal comes."""
    watch = MemoryGuard(settings)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, watch.end)

    _user_names()
    for _ in range(_WARM):  # memory that later looks use again
        watch.look_at_processes(watch.read_memory())
    watch.look()  # begins the thread
    if trouble := lock_memory():
        say(f"not all of the guard's memory is locked: {trouble}")
    gc.collect()
    gc.freeze()
    gc.disable()

    while not watch.ended:
        time.sleep(watch.look())
    watch.finish()


def lock_memory() -> str:
    """Lock the memory of this process; return how much of it could be locked, "" for all.

    Where the user may not lock all of it, code comes first: without swap nothing else is taken.
    """
    library = ctypes.CDLL(None)
    if library.mlockall(_LOCK_ALL) == 0:
        return ""

    total = 0
    rows = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    for row in sorted(rows, key=lambda row: " r-xp " not in row):
        begin, end = (int(part, 16) for part in row.split()[0].split("-"))
        words = (ctypes.c_void_p(begin), ctypes.c_size_t(end - begin))
        if " ---p " not in row and library.mlock(*words) == 0:
            total += end - begin
    return f"{total >> 20} MiB of it, by LimitMEMLOCK"


class MemoryLeft(NamedTuple):
    """The memory that is left, in KiB, and whether swap keeps all processes waiting."""

    left: int
    is_stalled: bool


@dataclass(frozen=True)
class ProcessSizes:
    """All processes with memory, ``at`` a moment of the monotonic clock, and what was ``left``."""

    at: float
    left: int
    processes: list[Process]


@dataclass(frozen=True)
class RankGroup:
    """A control group of the rank, as number ``inode``.

    ``members`` is the open list of its processes; ``kill`` its open file that ends them, -1 where
    only root may write that, as for docker's containers, whose processes are the user's.
    """

    inode: int
    members: int
    kill: int

    def read_members(self) -> list[int]:
        """Return the processes of the group, the first ones of many; none if it is gone."""
        with suppress(OSError):
            return [*map(int, os.pread(self.members, mmap.PAGESIZE, 0).split())]
        return []

    def end(self) -> bool:
        """End all processes; return whether that was at once, so that none can be left."""
        with suppress(OSError):
            os.write(self.kill, b"1")
            return True

        for member in self.read_members():
            with suppress(OSError):  # it ended, or belongs to another user
                os.kill(member, signal.SIGKILL)
        return False


class MemoryGuard:
    """The guard of one node: what it holds open, and what it saw last."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.name: str = settings["name"]
        self.floor: float = settings["floor"] * _GIB
        self.mark = 2 * self.floor  # KiB: less is little memory
        # A cache that is smaller in bytes leaves the share that vLLM wants free.
        needs = max(settings["needs"] - read_missing(), settings["share"])
        self.needs = max(needs * _GIB, self.mark)
        self.ended = False
        self._waits = True
        self._wait_ends = time.monotonic() + _LONGEST_WAIT

        self._meminfo = os.open("/proc/meminfo", os.O_RDONLY)
        self._pressure = os.memfd_create("none")
        with suppress(OSError):  # a kernel without it, or with psi=0
            pressure = os.open(_PRESSURE, os.O_RDONLY)
            os.pread(pressure, 1, 0)
            self._pressure = pressure
        self._pressure_at = 0.0  # seconds since the boot
        self._waited = 0.0
        self._stall = 0.0
        # Starts of all users take their memory one after the other: a locked folder is the turn.
        self._turn = os.memfd_create("turn")
        with suppress(OSError):  # there is no systemd
            self._turn = os.open(_TURN, os.O_RDONLY)
        self._turn_until = math.inf  # KiB: less is left once the rank has its memory
        self._record = self._open_record("json")
        if not os.fstat(self._record).st_size:
            with suppress(OSError):  # takes a block: later the disk may be full
                put_record(self._record, b" ")
        self._figures = self._open_record(BOOT.read_text().strip())
        with suppress(OSError):  # what is there is no file
            for boot in recorded_boots(self.name)[:-_BOOTS]:
                record_path(self.name, boot).unlink()
        self._lines = collections.deque[str](maxlen=_LINES)

        self._groups: dict[Path, RankGroup] = {}
        # Where groups are or will be: that of the unit, which runs a program in a container.
        self._paths = {_read_group(os.getpid()).with_name(settings["unit"])}
        self._killed: dict[int, bool] = {}  # inode of a group → whether at once
        self._looks = collections.deque[ProcessSizes]()
        self._looked_at = 0.0
        self._noted_at = 0.0
        self._status = ""

        threading.stack_size(_STACK)
        # A disk or a systemd that is slow holds up nothing else.
        self._writer = ThreadPoolExecutor(1)
        if "inside" in settings:
            threading.Thread(target=self._seek_containers, daemon=True).start()

    def _open_record(self, ending: str) -> int:
        """Return an open record; where none can be had, a file in memory."""
        try:
            return open_record(self.name, ending)
        except OSError as error:
            say(f"the guard goes on without this record: {error}")
            return os.memfd_create(ending)

    def end(self, *_signal: object) -> None:
        """Let the guard end after its present look."""
        self.ended = True

    def finish(self) -> None:
        """Write that systemd ended the guard, and wait until it is on the disk."""
        self._note_figures(self.read_memory().left, " ended")
        self._note_status(None)
        self._writer.shutdown()

    def look(self) -> float:
        """Look at the memory, and act; return the seconds until the next look."""
        memory = self.read_memory()
        if memory.left < (self.mark if memory.is_stalled else self.floor):
            self._end_rank(memory)

        now = time.monotonic()
        if now - self._looked_at >= _SECOND:
            self._looked_at = now
            self._find_groups()
        if self._waits:
            self._admit_rank()
        elif memory.left < self._turn_until or now > self._wait_ends:
            self._end_turn()
        # A little more ends the warning, so that it is not said again and again.
        mark = self.mark * (1.1 if self._status else 1)
        is_low = memory.left < mark
        pause = _SECOND if is_low and not self._waits else _SELDOM
        if now - self._noted_at >= pause:
            self._noted_at = now
            self.look_at_processes(memory)
            self._note_figures(memory.left)
            self._note_status(memory if is_low or self._waits else None)

        least, most = _PAUSES
        return min(max((memory.left - self.floor) / _FASTEST, least), most)

    def _admit_rank(self) -> None:
        """Let the rank start once there is the memory that it needs, or ``_LONGEST_WAIT`` is over.

        Until then systemd holds it back. A rank that runs, beside a new guard, has its memory.
        """
        members = [group.read_members() for group in self._groups.values()]
        is_short = not any(members) and not self._take_turn()
        self._waits = is_short and time.monotonic() < self._wait_ends
        if self._waits:
            return

        if is_short:
            self._writer.submit(say, "the rank starts without the memory that it needs")
        self._writer.submit(notify, "READY=1\nSTATUS=")
        self._status = ""
        self._noted_at = 0.0

    def _take_turn(self) -> bool:
        """Return whether the rank has its turn: its memory is there, and no other start has a turn.

        The turn ends once the rank has that memory, after ``_LONGEST_WAIT``, or with the guard.
        """
        with suppress(OSError):  # another one has it
            fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left = self.read_memory().left
            if left >= self.needs:
                self._turn_until = left - self.needs + self.mark
                self._wait_ends = time.monotonic() + _LONGEST_WAIT
                return True
        self._end_turn()
        return False

    def _end_turn(self) -> None:
        with suppress(OSError):
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    def read_memory(self) -> MemoryLeft:
        """Return the memory of this machine now."""
        meminfo = os.pread(self._meminfo, mmap.PAGESIZE, 0)
        left = _LEFT.search(meminfo)
        assert left

        if waited := _WAITED.search(os.pread(self._pressure, mmap.PAGESIZE, 0)):
            self._add_stall(int(waited[1]) / 1e6)
        has_stalled = self._stall >= _LONGEST_STALL
        return MemoryLeft(
            left=int(left[1]),
            is_stalled=has_stalled and bool(_SWAP.search(meminfo)),
        )

    def _add_stall(self, waited: float) -> None:
        """Count the seconds in which all processes waited, beyond ``_STALL_SHARE`` of the time.

        ``waited`` are those since the boot. Less waiting takes from the count.
        """
        now = time.monotonic()
        fair = _STALL_SHARE * (now - self._pressure_at)
        stall = self._stall + waited - self._waited - fair
        self._stall = min(max(stall, 0.0), _LONGEST_STALL)
        self._pressure_at = now
        self._waited = waited

    def look_at_processes(self, memory: MemoryLeft) -> None:
        """Keep the sizes of all processes now, and in the last seconds."""
        now = time.monotonic()
        processes = [process for process in read_processes() if process.size]
        sizes = ProcessSizes(now, memory.left, processes)
        if memory.left >= self.mark or not self._looks:
            self._calm = sizes
        self._looks.append(sizes)
        while len(self._looks) > 2 and now - self._looks[1].at >= _SELDOM:
            self._looks.popleft()

    def _seek_containers(self) -> None:
        """Find the rank's containers, in a thread of its own: a stuck process blocks its reader."""
        tries = collections.Counter[Path]()
        while True:
            self._paths.update(find_containers(self.name, tries))
            time.sleep(_SECOND)

    def _find_groups(self) -> None:
        """Open the groups of the rank that are new, and close those that are gone."""
        inodes = {}
        for path in self._paths.copy():
            with suppress(OSError):
                inodes[path] = path.stat().st_ino

        for path, group in list(self._groups.items()):
            if inodes.get(path) != group.inode:
                del self._groups[path]
                os.close(group.members)
                if group.kill >= 0:
                    os.close(group.kill)

        for path in inodes.keys() - self._groups.keys():
            with suppress(OSError):
                self._groups[path] = _open_group(path, inodes[path])

    def _end_rank(self, memory: MemoryLeft) -> None:
        """Kill the rank, then write why, once; what is left of it is killed at each look.

        A group that was ended at once is systemd's, whose own programs for the end run in it.
        """
        living = [group for group in self._groups.values() if group.read_members()]
        new = {group.inode for group in living} - self._killed.keys()
        if new and self.floor / 2 < memory.left < self.floor:  # else no time for a look
            self.look_at_processes(memory)

        for group in living:
            was_at_once = self._killed.get(group.inode)
            self._killed[group.inode] = was_at_once or group.end()
        if not new:
            return

        text = f"{self._describe(memory)}: ended the rank"
        stop = MemoryStop(
            start=self.settings["id"],
            time=time.time(),
            text=text,
            missing=round((self.mark - memory.left) / _GIB, 2),
        )
        with suppress(OSError):  # the disk is full
            put_record(self._record, encode_stop(stop))
        say(f"memory: {text}")

    def _describe(self, memory: MemoryLeft) -> str:
        floor = self.floor / _GIB
        text = f"{memory.left / _GIB:.1f} GiB left, memory_floor is {floor:.1f}"
        if memory.is_stalled:
            text += "; all processes wait for memory, since it is swapped"
        growth = describe_growth((self._looks[0], self._calm), self._looks[-1])
        return f"{text}; {growth}"

    def _describe_wait(self, memory: MemoryLeft) -> str:
        total = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE >> 10
        subject, size = most_grown(ProcessSizes(0.0, total, []), self._looks[-1])
        reason = "memory" if memory.left < self.needs else "another one's memory"
        text = f"the start waits for {reason}: {memory.left // _GIB} GiB are left"
        text += f", {-(-self.needs // _GIB):.0f} needed"
        return f"{text}; {subject} has {size // _GIB}"

    def _note_status(self, memory: MemoryLeft | None) -> None:
        """Tell systemd how little memory is left, and the journal once; None for enough."""
        status = ""
        if memory:
            status = f"little memory: {self._describe(memory)}"
            if self._waits:
                status = self._describe_wait(memory)
        if status and not self._status:
            self._writer.submit(say, status)
        if status or self._status:
            self._writer.submit(notify, f"STATUS={status}")
        self._status = status

    def _note_figures(self, left: int, ending: str = "") -> None:
        """Add a line to the file of this boot, in which only the last ones are kept."""
        self._lines.append(f"{time.time():.0f} {left >> 10}{ending}\n")
        content = "".join(self._lines).encode()
        self._writer.submit(put_record, self._figures, content)


def find_containers(name: str, tries: collections.Counter[Path]) -> Iterator[Path]:
    """Yield the control groups of containers that the cluster ``name`` has marked.

    Each group is tried ``_TRIES`` times: at first it may have the engine's program alone.
    """
    groups = set()
    for process in read_processes():
        with suppress(OSError):  # the process ended
            group = _read_group(process.pid)
            groups.add(group)
            if _CONTAINER.search(str(group)) and tries[group] < _TRIES:
                tries[group] += 1
                if read_mark(process.pid) == name:
                    yield group

    for group in tries.keys() - groups:
        del tries[group]


def _read_group(pid: int) -> Path:
    """Return the folder of a process's control group."""
    text = Path(f"/proc/{pid}/cgroup").read_text(errors="replace")
    return _GROUPS / text.rpartition("::/")[2].strip()


def _open_group(path: Path, inode: int) -> RankGroup:
    members = os.open(path / "cgroup.procs", os.O_RDONLY)
    kill = -1
    with suppress(OSError):  # it is root's, or Linux is older than 5.14
        kill = os.open(path / "cgroup.kill", os.O_WRONLY)
    return RankGroup(inode, members, kill)


def describe_growth(looks: Iterable[ProcessSizes], now: ProcessSizes) -> str:
    """Return what grew most since the first one of some looks since which anything did."""
    text = ""
    for before in looks:
        subject, grown = most_grown(before, now)
        seconds = now.at - before.at
        if grown >= _NOTHING:
            return f"{subject} grew by {grown / _GIB:.1f} GiB in {seconds:.0f} s"
        fell = max(before.left - now.left, 0) / _GIB
        text = f"{fell:.2f} GiB less than {seconds:.0f} s before, and no process grew"
    return text


def most_grown(before: ProcessSizes, now: ProcessSizes) -> tuple[str, int]:
    """Return what grew most, in words, and by how many KiB.

    That are the processes of a user's program together, with those that are new or have ended; or
    memory that belongs to no process.
    """
    growth = collections.Counter[int]()
    programs = collections.Counter({("", 0): 0})
    for sign, look in ((-1, before), (1, now)):
        for process in look.processes:
            growth[process.pid] += sign * process.size
            programs[process.name, process.user] += sign * process.size

    nobody = before.left - now.left - programs.total()
    [(program, grown)] = programs.most_common(1)
    if nobody > grown:
        return "memory of no process, as a GPU's,", nobody

    name, user = program
    pids = [row.pid for row in now.processes if (row.name, row.user) == program]
    most = max(pids, key=growth.__getitem__, default=0)
    who = f"process {most}"
    if growth[most] < grown / 2:
        who = f"{len(pids)} processes"
    return f"{name} ({who} of {_user_names().get(user, f'user {user}')})", grown


@functools.cache
def _user_names() -> dict[int, str]:
    """Return the names of this machine's users, read once: later a look-up could block."""
    return {user.pw_uid: user.pw_name for user in pwd.getpwall()}


if __name__ == "__main__":
    main(guard)
