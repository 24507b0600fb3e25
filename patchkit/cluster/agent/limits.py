"""Read what limits a process: memory that it may lock, processes, a container around it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_LIVE = Path("/")
_LOCKS = 14  # CAP_IPC_LOCK of linux/capability.h
# What the first process's control group is named after, by who made the container.
_GROUPS = {
    "docker": "docker",
    "libpod": "podman",
    "kubepods": "kubernetes",
    "cri-containerd": "containerd",
}


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

    ``pids`` is the most processes and threads of its control group, None for no limit, ``pids_now``
    how many there are; ``shm`` the size of /dev/shm in bytes; ``verbs`` how many RDMA devices have
    a file in /dev/infiniband, ``verbs_open`` how many of them this user may open.
    """

    kind: str = ""
    pids: int | None = None
    pids_now: int | None = None
    shm: int | None = None
    verbs: int = 0
    verbs_open: int = 0


def process_limits(process: str, root: Path = _LIVE) -> ProcessLimits:
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


def container_limits(root: Path = _LIVE) -> ContainerLimits:
    """Return the container that this process is in, with its limits."""
    files = sorted((root / "dev/infiniband").glob("uverbs*"))
    memory = root / "dev/shm"
    shm = os.statvfs(memory) if memory.is_dir() else None
    # Inside of a container its own group is the root of what is mounted.
    own = root / "sys/fs/cgroup"
    counts = [_read_text(own / f"pids.{what}").strip() for what in ("max", "current")]
    most, now = (int(count) if count.isdigit() else None for count in counts)
    first = _read_text(root / "proc/1/cgroup")
    kind = next((kind for name, kind in _GROUPS.items() if name in first), "")
    # One of LXC or nspawn is a machine of its own, with a systemd that starts the ranks.
    if (word := _read_text(root / "run/systemd/container").strip()) in ("docker", "podman", "oci"):
        kind = word
    if (root / ".dockerenv").exists():
        kind = "docker"
    if (root / "run/.containerenv").exists():
        kind = "podman"
    return ContainerLimits(
        kind=kind,
        pids=most,
        pids_now=now,
        shm=shm.f_frsize * shm.f_blocks if shm else None,
        verbs=len(files),
        verbs_open=sum(map(_can_open, files)),
    )


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _can_open(file: Path) -> bool:
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError:
        return False
    return True
