"""Return what doctor asks a node for, with the reason where it cannot be had. Runs there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchkit.cluster.agent.node_files import run_for_user
from patchkit.process import attempt
from patchkit.runtime.host.gpu import parse_rows, query_gpus
from patchkit.runtime.host.machine_root import LIVE, ToolUnavailable, whole

_LOCKS = 14  # CAP_IPC_LOCK of linux/capability.h
# What the first process's control group is named after, by who made the container.
_GROUPS = {
    "docker": "docker",
    "libpod": "podman",
    "kubepods": "kubernetes",
    "cri-containerd": "containerd",
}
_STATE = "temperature.gpu,power.draw,clocks.sm,utilization.gpu,clocks_throttle_reasons.active"


@dataclass(frozen=True, slots=True)
class GpuState:
    """How the first GPU is; None is unknown.

    Degrees Celsius, watts, MHz of its processors, how busy it is in percent, and why its clocks
    are lower than they could be (NVML's bits).
    """

    celsius: int | None
    watts: float | None
    mhz: int | None = None
    busy: int | None = None
    throttled: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Limits of a process: bytes that it may lock, None for no limit.

    ``locks`` is whether it may lock memory beyond any limit, None if that is unknown.
    """

    memlock: int | None = None
    locks: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerLimits:
    """What a container gives: ``kind`` is docker, podman … or "" outside of one.

    ``verbs`` is how many RDMA devices have a file in /dev/infiniband, ``verbs_open`` how many of
    them this user may open.
    """

    kind: str = ""
    verbs: int = 0
    verbs_open: int = 0


def process_limits(process: str, root: Path = LIVE) -> ProcessLimits:
    """Return the limits of a process of this user: its number, or ``self``.

    Raises OSError, and ValueError where they are hidden.
    """
    text = (root / "proc" / process / "limits").read_text(encoding="utf-8")
    limit = re.search(r"^Max locked memory +(\S+)", text, re.MULTILINE)
    if limit is None:
        raise ValueError("its limits are hidden")
    status = _read_text(root / "proc" / process / "status")
    may = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return ProcessLimits(
        memlock=int(limit[1]) if limit[1].isdigit() else None,
        locks=bool(int(may[1], 16) >> _LOCKS & 1) if may else None,
    )


def container_limits(root: Path = LIVE) -> ContainerLimits:
    """Return the container that this process is in, with its limits."""
    files = sorted((root / "dev/infiniband").glob("uverbs*"))
    first = _read_text(root / "proc/1/cgroup")
    kind = next((kind for name, kind in _GROUPS.items() if name in first), "")
    # One of LXC or nspawn is a machine of its own, with a systemd that starts the ranks.
    if (word := _read_text(root / "run/systemd/container").strip()) in (
        "docker",
        "podman",
        "oci",
    ):
        kind = word
    if (root / ".dockerenv").exists():
        kind = "docker"
    if (root / "run/.containerenv").exists():
        kind = "podman"
    verbs_open = 0
    for file in files:
        with contextlib.suppress(OSError):
            os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
            verbs_open += 1
    return ContainerLimits(kind=kind, verbs=len(files), verbs_open=verbs_open)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


_SECONDS = 3.0  # for each program that is asked
_LINES, _LONGEST = 400, 500
_TROUBLE = (
    "NVRM|Xid|mlx5|AER:|PCIe Bus Error|Out of memory|Killed process|oom-kill|oom_reaper"
    "|temperature above|critical temperature|I/O error|EXT4-fs error|segfault|Linux version"
)


class UnreadError(Exception):
    """A fact cannot be had, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilers:
    """What Triton makes its launcher with: a C compiler, and Python.h; "" for none."""

    compiler: str = ""
    python_h: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUser:
    """A process that computes on the GPU, whose it is, and the MiB that it has; None: unknown."""

    pid: int
    name: str = ""
    user: str = ""
    mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """What a node says of its health; None or "" is unknown, ``unread`` says why.

    ``page_cache`` is in KiB; ``guards`` are services that end a process before memory is used up;
    ``kernel`` are the lines of this boot's kernel log that may tell of trouble; ``manager`` is
    whether the user's systemd answers.
    ``process`` are the limits of this process, ``unit`` those of the unit's, if it runs.
    """

    page_cache: int | None = None
    guards: tuple[str, ...] | None = None
    kernel: tuple[str, ...] | None = None
    gpu: GpuState | None = None
    gpu_users: tuple[GpuUser, ...] | None = None
    manager: bool | None = None
    process: ProcessLimits | None = None
    unit: ProcessLimits | None = None
    container: ContainerLimits | None = None
    compilers: Compilers | None = None
    unread: Mapping[str, str] = field(default_factory=dict)

    def why_not(self, name: str) -> str:
        """Return why a fact is missing."""
        return self.unread.get(name) or f"the node does not say: {name}"


def collect_health(venv: str, unit: str) -> NodeHealth:
    """Return the facts, with the limits of the process of a unit, if that runs.

    ``venv`` is the environment that may have vLLM.
    """
    asked = ("--property=MainPID", "--value", "--", unit)
    shown = run_for_user("systemctl", "show", *asked)
    main = int(shown.output) if shown.output.strip().isdigit() else 0
    environment: Mapping[str, str] = os.environ
    with contextlib.suppress(OSError):
        own = (
            Path(f"/proc/{main}/environ")
            .read_bytes()
            .decode(errors="replace")
            .split("\0")
        )
        environment = dict(pair.split("=", 1) for pair in own if "=" in pair)
    parts: dict[str, Callable[[], object]] = {
        "page_cache": _page_cache,
        "guards": _running_guards,
        "kernel": read_kernel_log,
        "gpu": gpu_state,
        "gpu_users": gpu_users,
        "process": lambda: process_limits("self"),
        "unit": lambda: process_limits(str(main)),
        "container": container_limits,
        "compilers": lambda: find_compilers(Path(venv).expanduser(), environment),
    }
    found: dict[str, Any] = {}
    unread: dict[str, str] = {}
    if not main:
        unread["unit"] = shown.trouble or f"{unit} does not run"
        del parts["unit"]
    with ThreadPoolExecutor(len(parts)) as pool:
        begun = {name: pool.submit(work) for name, work in parts.items()}
        for name, part in begun.items():
            try:
                found[name] = part.result()
            except (
                UnreadError,
                ToolUnavailable,
                OSError,
                LookupError,
                ValueError,
            ) as error:
                unread[name] = str(error)
    return NodeHealth(**found, manager=not shown.trouble, unread=unread)


def _page_cache() -> int:
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    memory = {
        name: int(number) for name, number in re.findall(r"(?m)^(\w+): +(\d+)", text)
    }
    return memory["Cached"] + memory["Buffers"] - memory["Shmem"]


def _running_guards() -> tuple[str, ...]:
    names = ("earlyoom", "systemd-oomd", "nohang")
    said = attempt("systemctl", "is-active", *names, timeout=_SECONDS).output.split()
    if len(said) != len(names):
        raise UnreadError("systemctl does not say which services run")
    return tuple(
        name for name, state in zip(names, said, strict=True) if state == "active"
    )


def find_compilers(venv: Path, environment: Mapping[str, str]) -> Compilers:
    """Return what a rank of this environment, if it is there, finds with these variables."""
    path = os.pathsep.join((f"{venv}/bin", environment.get("PATH", os.defpath)))
    found = (shutil.which(name, path=path) for name in ("gcc", "cc", "clang"))
    header = ""
    if (python := venv / "bin" / "python").exists():
        minor = next((each.name for each in venv.glob("lib/python3.*")), "")
        homes = (
            python.resolve().parents[1],
            venv,
        )  # what it was made with, and its own
        headers = (home / "include" / minor / "Python.h" for home in homes)
        header = next((str(each) for each in headers if each.is_file()), "")
    return Compilers(compiler=next(filter(None, found), ""), python_h=header)


def read_kernel_log() -> tuple[str, ...]:
    """Return the last of these lines of this boot, oldest first. Raises UnreadError.

    That there are none says something only of a log that may be read as a whole.
    """
    done = attempt("dmesg", "--time-format=iso", timeout=_SECONDS)
    if done.trouble:
        why = f"dmesg: {done.errors.strip() or done.trouble}".splitlines()[0]
        homes = map(Path, ("/var/log/journal", "/run/log/journal"))
        journals = (file for home in homes for file in home.glob("*/system.journal"))
        if not any(os.access(file, os.R_OK) for file in journals):
            raise UnreadError(
                f"{why}; the journal of the system is for root and the group adm"
            )
        options = ("--dmesg", "--quiet", "--no-pager", "--output=short-iso")
        done = attempt("journalctl", *options, timeout=_SECONDS)
        if done.trouble or not done.output.strip():
            raise UnreadError(
                f"{why}; journalctl: {done.trouble or 'has no line of the kernel'}"
            )
    found = (
        line[:_LONGEST]
        for line in done.output.splitlines()
        if re.search(_TROUBLE, line)
    )
    return tuple(found)[-_LINES:]


def gpu_state() -> GpuState:
    """Return how the first GPU is. Raises ToolUnavailable."""
    (state, *_others) = parse_rows(query_gpus(f"--query-gpu={_STATE}", "--id=0"), 5)
    celsius, watts, mhz, busy, throttled = state
    return GpuState(
        celsius=whole(celsius),
        watts=float(watts) if re.fullmatch(r"\d{1,9}(\.\d+)?", watts) else None,
        mhz=whole(mhz),
        busy=whole(busy),
        throttled=int(throttled, 16)
        if re.fullmatch("0x[0-9a-fA-F]+", throttled)
        else None,
    )


def gpu_users() -> tuple[GpuUser, ...]:
    """Return the processes that compute on the first GPU. Raises ToolUnavailable."""
    text, found = query_gpus("--query-compute-apps=pid,used_memory", "--id=0"), []
    for pid, mib in parse_rows(text, 2) if text.strip() else ():
        if pid.isdecimal():
            # One of another namespace has no name here.
            said = attempt(
                "ps", "-o", "user:32=,comm=", "-p", pid, timeout=_SECONDS
            ).output
            user, _, name = said.strip().partition(" ")
            found.append(
                GpuUser(pid=int(pid), name=name.strip(), user=user, mib=whole(mib))
            )
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRoom:
    """A disk by a folder on it: bytes that a user may write, of all; files that may be made.

    ``files`` is None where the file system has no such limit.
    """

    folder: str
    free: int
    total: int
    files: int | None


def disk_rooms(folders: Sequence[str]) -> Iterator[DiskRoom]:
    """Yield the disks of these folders, each once; of one that is not there that of its parent."""
    seen = set()
    for each in folders:
        place = Path(each).expanduser()
        nearest = next(folder for folder in (place, *place.parents) if folder.exists())
        device = nearest.stat().st_dev
        if device not in seen:
            seen.add(device)
            found = os.statvfs(nearest)
            yield DiskRoom(
                folder=str(nearest),
                free=found.f_bavail * found.f_frsize,
                total=found.f_blocks * found.f_frsize,
                files=found.f_favail if found.f_files else None,
            )
