"""Read the health of a node for doctor, or the reason why a part is unknown. Runs on the node.

Look for troubles that stop a node's rank, or soon will: full disks, kills, a lost address. That is
done at each `status`, so it has to be fast: a source that cannot be read counts as no trouble.
"""

import os
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import field
from datetime import datetime
from pathlib import Path
from typing import Any

from patchkit.cluster.agent.node_files import run_for_user
from patchkit.frozen import Fields, Texts, Values, frozen, positional
from patchkit.process import attempt
from patchkit.reading import read_environment, user_path
from patchkit.runtime.host.probe import (
    LIVE,
    ToolUnavailable,
    parse_rows,
    parse_whole,
    query_gpus,
)

_LOCKS = 14  # CAP_IPC_LOCK of linux/capability.h
_SECONDS = 3.0  # for each program
_LINES = 400  # of the kernel's log
_LONGEST = 500  # characters of a line
_JOURNALS = ("/var/log/journal", "/run/log/journal")
_JOURNAL = "*/system.journal"
_TROUBLE = (
    "NVRM|Xid|mlx5|AER:|PCIe Bus Error|Out of memory|Killed process|oom-kill|oom_reaper"
    "|temperature above|critical temperature|I/O error|EXT4-fs error|segfault|Linux version"
)
# A part of the control group of process 1 → the kind of container.
_GROUPS = {
    "docker": "docker",
    "libpod": "podman",
    "kubepods": "kubernetes",
    "cri-containerd": "containerd",
}
_STATE = "temperature.gpu,power.draw,clocks.sm,utilization.gpu,clocks_throttle_reasons.active"


@positional
class GpuState:
    """The state of the first GPU; None is unknown.

    ``mhz`` is the clock of its processors, ``busy`` is in percent; ``throttled`` are NVML's bits
    that say why the clocks are low.
    """

    celsius: int | None
    watts: float | None
    mhz: int | None = None
    busy: int | None = None
    throttled: int | None = None


@frozen
class ProcessLimits:
    """Limits of a process: ``memlock`` in bytes, None for no limit.

    ``locks`` says whether the process may lock memory beyond any limit, None if that is unknown.
    """

    memlock: int | None = None
    locks: bool | None = None


@frozen
class ContainerLimits:
    """The container that a process runs in: ``kind`` is docker, podman …, "" outside of one.

    ``verbs`` is how many RDMA devices have a file in /dev/infiniband, ``verbs_open`` how many of
    these files this user may open.
    """

    kind: str
    verbs: int
    verbs_open: int


def process_limits(process: int, root: Path = LIVE) -> ProcessLimits:
    """Return the limits of one of this user's processes; ``process`` is its number.

    ``root`` is the folder of the machine's files. Raises OSError if the process does not exist.
    """
    memlock, _hard = resource.prlimit(process, resource.RLIMIT_MEMLOCK)
    status = _read_text(root / f"proc/{process}/status")
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    locks = None
    if capabilities:
        locks = bool(int(capabilities[1], 16) >> _LOCKS & 1)

    return ProcessLimits(
        memlock=None if memlock == resource.RLIM_INFINITY else memlock,
        locks=locks,
    )


def container_limits(root: Path = LIVE) -> ContainerLimits:
    """Return the container that this process runs in, and how many RDMA devices it may open."""
    files = sorted((root / "dev/infiniband").glob("uverbs*"))
    verbs_open = 0
    for file in files:
        with suppress(OSError):
            descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            os.close(descriptor)
            verbs_open += 1

    return ContainerLimits(
        kind=_container_kind(root),
        verbs=len(files),
        verbs_open=verbs_open,
    )


def _container_kind(root: Path) -> str:
    """Return ``kind`` of ContainerLimits: "docker", "podman" …, "" outside of a container."""
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"

    # A container of LXC or nspawn is a machine of its own, with a systemd that starts the ranks.
    word = _read_text(root / "run/systemd/container").strip()
    if word in ("docker", "podman", "oci"):
        return word

    group = _read_text(root / "proc/1/cgroup")
    return next((kind for name, kind in _GROUPS.items() if name in group), "")


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class UnreadError(Exception):
    """A fact cannot be read; the text says why."""


@frozen
class Compilers:
    """The paths that Triton needs to build its launcher: a C compiler and Python.h; "" for none."""

    compiler: str = ""
    python_h: str = ""


Parts = dict[str, Callable[[], object]]
"""Name → the function that reads this part of a node's facts."""


@frozen
class GpuUser:
    """A process that computes on the GPU; ``mib`` is its memory there, None if unknown."""

    pid: int
    name: str = ""
    user: str = ""
    mib: int | None = None


@frozen
class NodeHealth:
    """The health of a node; a part that is unknown is None, and ``unread`` says why, by its name.

    ``page_cache`` is in KiB; ``kernel`` are the lines of this boot's kernel log that may tell of
    trouble; ``manager`` says whether the user's systemd answers. ``process`` are the limits of the
    process that reads all this, ``unit`` those of the unit's main process if the unit runs.
    """

    page_cache: int | None = None
    kernel: Texts | None = None
    gpu: GpuState | None = None
    gpu_users: tuple[GpuUser, ...] | None = None
    manager: bool | None = None
    process: ProcessLimits | None = None
    unit: ProcessLimits | None = None
    container: ContainerLimits | None = None
    compilers: Compilers | None = None
    unread: Values = field(default_factory=dict)

    def why_not(self, name: str) -> str:
        """Return why the part ``name`` is unknown."""
        return self.unread.get(name) or f"the node does not say: {name}"


def collect_health(venv: str, unit: str) -> NodeHealth:
    """Return the health of this node, with the limits of the unit's main process if the unit runs.

    ``venv`` is the path of the environment that may have vLLM. What cannot be read is named in
    ``unread``.
    """
    words = ("show", "--property=MainPID", "--value", "--", unit)
    systemctl = run_for_user("systemctl", *words)
    # systemd says 0 of a unit that does not run.
    pid = parse_whole(systemctl.output.strip()) or 0

    parts: Parts = {
        "page_cache": _page_cache,
        "kernel": read_kernel_log,
        "gpu": gpu_state,
        "gpu_users": gpu_users,
        "process": lambda: process_limits(os.getpid()),
        "container": container_limits,
        "compilers": lambda: find_compilers(user_path(venv), _read_environment(pid)),
    }

    unread: dict[str, str] = {}
    if pid:
        parts["unit"] = lambda: process_limits(pid)
    else:
        unread["unit"] = systemctl.trouble or f"{unit} does not run"

    unreadable = (UnreadError, ToolUnavailable, OSError, LookupError, ValueError)
    values, errors = run_parts(parts, unreadable)
    unread |= {name: str(error) for name, error in errors.items()}
    return NodeHealth(
        **values,
        manager=not systemctl.trouble,
        unread=unread,
    )


def run_parts(
    parts: Parts,
    expected: tuple[type[Exception], ...],
) -> tuple[Fields, dict[str, Exception]]:
    """Run functions side by side; return their values, and their ``expected`` errors, by name.

    Raises an error that is not expected.
    """
    with ThreadPoolExecutor(len(parts)) as pool:
        futures = {name: pool.submit(part) for name, part in parts.items()}

    values = {}
    errors = {}
    for name, future in futures.items():
        try:
            values[name] = future.result()
        except expected as error:
            errors[name] = error
    return values, errors


def _read_environment(pid: int) -> Values:
    """Return the variables of the process ``pid``; those of this process if they are hidden.

    Without such a process, as for 0, the result is this process's as well.
    """
    with suppress(OSError):
        return read_environment(pid)
    return os.environ


def _page_cache() -> int:
    """Return the KiB of memory that hold content of files, without shared memory."""
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    kib = dict(re.findall(r"(?m)^(\w+): +(\d+)", text))
    files = int(kib["Cached"]) + int(kib["Buffers"])
    return files - int(kib["Shmem"])


def find_compilers(venv: Path, environment: Values) -> Compilers:
    """Return the C compiler and the Python.h that a rank finds.

    The rank runs in ``venv``; ``environment`` are its variables, of which PATH counts.
    """
    folders = environment.get("PATH", os.defpath)
    path = f"{venv}/bin{os.pathsep}{folders}"
    compilers = (shutil.which(name, path=path) for name in ("gcc", "cc", "clang"))
    compiler = next(filter(None, compilers), "")

    release = next((folder.name for folder in venv.glob("lib/python3.*")), "")
    # The Python that made the venv comes first.
    homes = ((venv / "bin/python").resolve().parents[1], venv)
    headers = (home / "include" / release / "Python.h" for home in homes)
    python_h = next(filter(Path.is_file, headers), "")
    return Compilers(compiler=compiler, python_h=str(python_h))


def read_kernel_log() -> Texts:
    """Return the lines of this boot's kernel log that may tell of trouble: the last, oldest first.

    Raises UnreadError if this user may not read the whole log: then no line would prove nothing.
    """
    lines = _read_kernel_text().splitlines()
    troubles = [line[:_LONGEST] for line in lines if re.search(_TROUBLE, line)]
    return tuple(troubles[-_LINES:])


def _read_kernel_text() -> str:
    """Return the kernel's log of this boot, by dmesg, else by journalctl. Raises UnreadError."""
    done = attempt("dmesg", "--time-format=iso", timeout=_SECONDS)
    if not done.trouble:
        return done.output

    reason = f"dmesg: {done.errors.strip() or done.trouble}".splitlines()[0]
    journals = (file for home in _JOURNALS for file in Path(home).glob(_JOURNAL))
    if not any(os.access(file, os.R_OK) for file in journals):
        access = "the journal of the system is for root and the group adm"
        raise UnreadError(f"{reason}; {access}")

    options = ("--dmesg", "--quiet", "--no-pager", "--output=short-iso")
    done = attempt("journalctl", *options, timeout=_SECONDS)
    if done.trouble or not done.output.strip():
        silence = done.trouble or "has no line of the kernel"
        raise UnreadError(f"{reason}; journalctl: {silence}")
    return done.output


def gpu_state() -> GpuState:
    """Return the state of the first GPU. Raises ToolUnavailable if nvidia-smi gives none."""
    (row, *_rows) = parse_rows(query_gpus(f"--query-gpu={_STATE}", "--id=0"), 5)
    celsius, watts, mhz, busy, throttled = row
    is_hex = re.fullmatch("0x[0-9a-fA-F]+", throttled)

    return GpuState(
        celsius=parse_whole(celsius),
        watts=float(watts) if re.fullmatch(r"\d{1,9}(\.\d+)?", watts) else None,
        mhz=parse_whole(mhz),
        busy=parse_whole(busy),
        throttled=int(throttled, 16) if is_hex else None,
    )


def gpu_users() -> tuple[GpuUser, ...]:
    """Return the processes that compute on the first GPU. Raises ToolUnavailable likewise."""
    text = query_gpus("--query-compute-apps=pid,used_memory", "--id=0")
    if not text.strip():
        return ()
    rows = parse_rows(text, 2)
    users = [_gpu_user(pid, mib) for pid, mib in rows if pid.isdecimal()]
    return tuple(users)


def _gpu_user(pid: str, mib: str) -> GpuUser:
    # A process of another namespace has no name here.
    words = ("ps", "-o", "user:32=,comm=", "-p", pid)
    shown = attempt(*words, timeout=_SECONDS).output
    user, _, name = shown.strip().partition(" ")
    return GpuUser(
        pid=int(pid),
        name=name.strip(),
        user=user,
        mib=parse_whole(mib),
    )


@frozen
class DiskRoom:
    """The room on the disk of a folder: a user may still write ``free`` bytes, of ``total``.

    ``files`` is how many files may still be made, None where the file system has no such limit.
    """

    folder: str
    free: int
    total: int
    files: int | None


def disk_rooms(folders: Sequence[str]) -> Iterator[DiskRoom]:
    """Yield the room on the disks of folders, each disk once.

    A folder that does not exist counts as the nearest folder above it that does.
    """
    devices = set()
    for folder in folders:
        path = user_path(folder)
        nearest = next(filter(Path.exists, (path, *path.parents)))
        device = nearest.stat().st_dev
        if device in devices:
            continue

        devices.add(device)
        room = os.statvfs(nearest)
        yield DiskRoom(
            folder=str(nearest),
            free=room.f_bavail * room.f_frsize,
            total=room.f_blocks * room.f_frsize,
            files=room.f_favail if room.f_files else None,
        )


_RECENT = 3600.0  # seconds: older kills are not reported
_MOST = 3  # kills that are reported, the last ones
_KILLED = re.compile(r"^(\S{19})\S* .*Killed process (\d+) \(([^)]*)\)")
# Words of the user's systemd about a unit. The kernel's log says nothing of systemd-oomd.
_BY_KERNEL = "killed by the OOM killer"
_BY_OOMD = "systemd-oomd killed"
_RANK_STATE = "~/.local/state"  # the folder of what ranks compile and write


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
        disks=tuple(disk_rooms(["~", _RANK_STATE])),
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
