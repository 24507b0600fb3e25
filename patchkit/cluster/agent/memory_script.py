"""End this node's rank before its memory is used up: the unit beside the rank runs this script.

    memory.py guard     kill the rank as soon as less memory is left than the floor

CPU and GPU of some devices share one memory. When it is used up, the kernel's own killer comes too
late, since the memory of a GPU belongs to no process. A process of its own, memory_trigger.py, ends
the rank. All else is here, and may wait for memory or a disk: this process finds the rank's groups
and who grew, lets the rank start, and keeps the record.

This file is copied to the nodes, beside group.py, memory_record.py and what both import.
"""

import collections
import fcntl
import functools
import math
import mmap
import os
import pwd
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from patchkit.cluster.agent.group_script import (
    Settings,
    leave,
    main,
    notify,
    read_missing,
    say,
)
from patchkit.cluster.agent.memory_record import (
    BOOT,
    GROUPS,
    MemoryStop,
    clean_text,
    encode_stop,
    has_unified_groups,
    open_record,
    put_record,
    read_turn,
    record_path,
    recorded_boots,
)
from patchkit.cluster.agent.memory_trigger import (
    GIB,
    MEMBERS,
    MemoryLeft,
    MemoryReader,
    start_trigger,
)
from patchkit.cluster.agent.processes import Process, read_mark, read_processes

_MARK = 2  # floors: less is little memory
_PAUSE = 0.2  # seconds between two looks at the memory and the rank's groups
_SECOND = 1.0  # between two looks at processes while little is left
_SHARE = 10  # looks at processes take one part in so many of the time, where each one is slow
_SELDOM = 10.0  # seconds between them otherwise, and between two lines for the status
_LINES = 60  # of figures
_BOOTS = 8  # of which figures are kept
# Not in the home, which nodes may share: ranks of one cluster that wait for each other hang.
_TURN = "/run/user"
_KEPT = 3  # the file that systemd kept: sd_listen_fds(3)
_CONTAINER = re.compile("docker|libpod")  # in the path of a container's group
_TRIES = 10  # to read the mark of a new group
_LONGEST_WAIT = 600.0  # seconds until a rank starts though memory is missing
_NOTHING = 100 << 10  # KiB: less growth explains nothing


def guard(settings: Settings) -> None:
    """Kill this node's rank whenever less than ``floor`` GiB are left, until a signal comes.

    Ends with 1 where it could end nothing, since control groups are not those of version 2 alone.
    """
    if not has_unified_groups():
        fail("control groups are of version 1 or hybrid, in which no rank is found")

    floor = settings["floor"] * GIB
    trigger = start_trigger(floor, _MARK * floor)
    watch = MemoryGuard(settings, trigger)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, watch.end)

    _user_names()
    while not watch.ended:
        watch.look()
        watch.wait()
    watch.finish()


def fail(trouble: str) -> NoReturn:
    """Say why the guard ends, also to `status`, which shows it until the next start."""
    _try(notify, f"STATUS=the guard does not run: {trouble}")
    leave(1, f"error: the memory guard ends: {trouble}")


@dataclass(frozen=True)
class ProcessSizes:
    """All processes with memory, ``at`` a moment of the monotonic clock, and what was ``left``."""

    at: float
    left: int
    processes: list[Process]


class MemoryGuard:
    """The guard of one node: what it holds open, and what it saw last."""

    def __init__(self, settings: Settings, trigger: socket.socket) -> None:
        self.settings = settings
        self._trigger = trigger
        self._reader = MemoryReader()
        self.name: str = settings["name"]

        self.floor: float = settings["floor"] * GIB
        self.mark = _MARK * self.floor  # KiB
        memory = settings["memory"]
        self.takes = (memory["takes"] - read_missing()) * GIB
        self.needs = max(self.takes, memory["free"] * GIB, self.mark)

        self.ended = False
        self._waits = True
        self._wait_ends = time.monotonic() + _LONGEST_WAIT  # or the turn, once taken

        # Starts of all users take their memory one after the other: a locked folder is the turn.
        # systemd keeps it while it replaces a guard that was killed.
        self._turn = _KEPT
        if "LISTEN_FDS" not in os.environ:
            self._turn = os.open(_TURN, os.O_RDONLY)
            _try(notify, "FDSTORE=1", self._turn)
        self._turn_until = math.inf  # KiB: less is left once the rank has its memory
        boot = BOOT.read_text().strip()
        self._former_turn = read_turn(self.name)  # of a guard that was killed

        self._record = self._open_record("json")
        if not os.fstat(self._record).st_size:
            _try(put_record, self._record, b" ")  # a block: later the disk may be full
        self._figures = self._open_record(boot)

        with suppress(OSError):  # what is there is no file
            for former in recorded_boots(self.name)[:-_BOOTS]:
                record_path(self.name, former).unlink()

        self._lines = collections.deque[str](maxlen=_LINES)

        self._inodes: dict[Path, int] = {}  # of groups that the trigger has
        # Where groups are or will be: that of the unit, which runs a program in a container.
        self._paths = {_read_group(os.getpid()).with_name(settings["unit"])}

        self._looks = collections.deque[ProcessSizes]()
        self._noted_at = -math.inf
        self._effort = 0.0  # seconds of the last look at processes
        self._status = ""

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
        """Write that systemd ended the guard."""
        self._end_turn()
        self._note_figures(self._reader.read().left, " ended")
        self._note_status(None)

    def look(self) -> None:
        """Look at the memory and the rank, and say what is to be said."""
        memory = self._reader.read()
        now = time.monotonic()
        self._find_groups()

        if self._waits:
            self._admit_rank()
        elif memory.left < self._turn_until or now > self._wait_ends:
            self._end_turn()

        # A little more ends the warning, so that it is not said again and again.
        mark = self.mark * (1.1 if self._status else 1)
        is_low = memory.left < mark

        pause = _SECOND if is_low and not self._waits else _SELDOM
        if now - self._noted_at >= max(pause, _SHARE * self._effort):
            self._noted_at = now
            self.look_at_processes(memory)
            self._effort = time.monotonic() - now
            self._note_figures(memory.left)
            self._note_status(memory if is_low or self._waits else None)

    def wait(self) -> None:
        """Wait for the next look, or until the trigger ended the rank.

        Ends with 1 if the trigger is gone: systemd starts both again.
        """
        if not select.select([self._trigger], [], [], _PAUSE)[0]:
            return

        text = b""
        with suppress(OSError):  # it ended before it had read all
            text = self._trigger.recv(mmap.PAGESIZE)
        if text[:1].isdigit():
            left, is_stalled, *refused = map(int, text.split())
            self._keep_stop(MemoryLeft(left, bool(is_stalled)), refused)
        elif not self.ended:
            trouble = clean_text(text.decode(errors="replace")) or "it was killed"
            fail(f"the process that ends the rank is gone: {trouble}")

    def _admit_rank(self) -> None:
        """Let the rank start once there is the memory that it needs, or ``_LONGEST_WAIT`` is over.

        Until then systemd holds it back. If the last guard was killed, the rank runs already, and
        may still load.
        """
        left = self._reader.read().left
        now = time.monotonic()
        runs = self._has_members()
        is_short = False
        if not runs:
            # Once less is left, the rank holds all but ``mark`` of what it takes, or at least half.
            until = left - self.takes + min(self.mark, self.takes / 2)
            is_short = left < self.needs or not self._take_turn(
                until, now + _LONGEST_WAIT
            )
        elif former := self._former_turn:
            self._take_turn(*former)

        self._waits = is_short and now < self._wait_ends
        if self._waits:
            return

        if is_short:
            _try(say, "the rank starts without the memory that it needs")
        _try(notify, "READY=1\nSTATUS=")
        self._status = ""
        self._noted_at = -math.inf

    def _take_turn(self, until: float, ends: float) -> bool:
        """Take the turn unless another start has it; return whether this one has it.

        It ends once less than ``until`` KiB are left, at ``ends``, or with the guard.
        """
        with suppress(OSError):  # another one has it
            fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._turn_until = until
            self._wait_ends = ends
            # A planned load may swap, and so stall: a stall ends the rank below what it will leave.
            mark = max(self.floor, min(self.mark, until - self.mark))
            _try(self._trigger.send, b"%d" % mark)
            return True
        return False

    def _end_turn(self) -> None:
        _try(fcntl.flock, self._turn, fcntl.LOCK_UN)
        self._turn_until = math.inf

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
        """Tell the trigger the groups of the rank that are new."""
        for path in self._paths.copy():
            with suppress(OSError):  # it is gone, or not there yet
                inode = path.stat().st_ino
                if self._inodes.get(path) != inode:
                    self._inodes[path] = inode
                    self._trigger.send(bytes(path))

    def _has_members(self) -> bool:
        """Return whether the rank has processes."""
        members = b""
        for path in self._inodes:
            with suppress(OSError):
                members += (path / MEMBERS).read_bytes()
        return bool(members)

    def _keep_stop(self, memory: MemoryLeft, refused: Sequence[int]) -> None:
        """Record and say why the trigger ended the rank; ``memory`` is what was left then.

        ``refused`` are its processes that this user may not end.
        """
        text = f"{self._describe(memory)}: {self._describe_end(refused)}"
        stop = MemoryStop(
            start=self.settings["id"],
            time=time.time(),
            text=text,
            missing=round((self.mark - memory.left) / GIB, 2),
        )
        _try(put_record, self._record, encode_stop(stop))
        _try(say, f"memory: {text}")

    def _describe_end(self, refused: Sequence[int]) -> str:
        if refused:
            names = ", ".join(
                f"{row.name} (process {row.pid} of {_user_name(row.user)})"
                for row in read_processes()
                if row.pid in refused
            )
            return f"SIGKILL is refused, so docker alone may end: {names or 'none now'}"

        engine = self.settings.get("inside", ("",))[0]
        has_container = any(map(_CONTAINER.search, map(str, self._inodes)))
        if engine.endswith("docker") and not has_container:
            return "ended docker's program, but saw no container of the rank"
        return "ended the rank"

    def _describe(self, memory: MemoryLeft) -> str:
        left = f"{memory.left / GIB:.1f} GiB left"
        text = f"{left}, memory_floor is {self.floor / GIB:.1f}"
        if memory.is_stalled:
            text += "; all processes wait for memory, since it is swapped"
        growth = describe_growth((self._looks[0], self._calm), self._looks[-1])
        return f"{text}; {growth}"

    def _describe_wait(self, memory: MemoryLeft) -> str:
        # Growth since a moment when all memory was free: what each program has.
        total = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE >> 10
        subject, size = most_grown(ProcessSizes(0.0, total, []), self._looks[-1])
        reason = "memory" if memory.left < self.needs else "another start to load"
        text = f"the start waits for {reason}: {memory.left / GIB:.1f} GiB are left"
        return f"{text}, {self.needs / GIB:.1f} needed; {subject} has {size / GIB:.1f}"

    def _note_status(self, memory: MemoryLeft | None) -> None:
        """Tell systemd how little memory is left, and the journal once; None for enough."""
        status = ""
        if memory:
            status = f"little memory: {self._describe(memory)}"
            if self._waits:
                status = self._describe_wait(memory)

        if status and not self._status:
            _try(say, status)
        if status or self._status:
            _try(notify, f"STATUS={status}")
        self._status = status

    def _note_figures(self, left: int, ending: str = "") -> None:
        """Add a line to the file of this boot, in which only the last ones are kept."""
        self._lines.append(f"{time.time():.0f} {left >> 10}{ending}\n")

        text = "".join(self._lines)
        if self._turn_until < math.inf:
            text = f"turn={self._turn_until:.0f},{self._wait_ends:.0f}\n{text}"
        _try(put_record, self._figures, text.encode())


def _try(work: Callable[..., object], *words: object) -> None:
    """Do work that may fail, and has to end no guard: the disk is full, the journal is gone."""
    with suppress(OSError):
        work(*words)


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
    return GROUPS / text.rpartition("::/")[2].strip()


def describe_growth(looks: Iterable[ProcessSizes], now: ProcessSizes) -> str:
    """Return what grew most since the first of ``looks`` that shows growth, or that none grew."""
    text = ""
    for before in looks:
        subject, grown = most_grown(before, now)
        seconds = now.at - before.at
        if grown >= _NOTHING:
            return f"{subject} grew by {grown / GIB:.1f} GiB in {seconds:.0f} s"
        fell = max(before.left - now.left, 0) / GIB
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
    return f"{name} ({who} of {_user_name(user)})", grown


def _user_name(user: int) -> str:
    return _user_names().get(user, f"user {user}")


@functools.cache
def _user_names() -> dict[int, str]:
    """Return the names of this machine's users, read once: later a look-up could block."""
    return {user.pw_uid: user.pw_name for user in pwd.getpwall()}


if __name__ == "__main__":
    main(guard)
