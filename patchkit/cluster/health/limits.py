"""Read what limits a process: memory that it may lock, processes, a container around it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
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
_SYSTEMD_SAYS = ("docker", "podman", "oci")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Limits of a process: bytes that it may lock and open files; None for no limit.

    ``locks`` is whether it may lock memory beyond any limit, None if that is unknown.
    """

    known: bool = False
    memlock: int | None = None
    files: int | None = None
    locks: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerLimits:
    """What a container gives: ``kind`` is docker, podman … or "" outside of one.

    ``pids`` is the most processes and threads of the control group that is nearest to its limit,
    None for no limit, ``pids_now`` how many there are; ``shm`` the size of /dev/shm in bytes;
    ``verbs`` how many RDMA devices have a file in /dev/infiniband, ``verbs_open`` how many of them
    this user may open.
    """

    kind: str = ""
    pids: int | None = None
    pids_now: int | None = None
    shm: int | None = None
    verbs: int = 0
    verbs_open: int = 0


def process_limits(process: str, root: Path = _LIVE) -> ProcessLimits:
    """Return the limits of a process of this user: its number, or ``self``. Raises OSError."""
    text = (root / "proc" / process / "limits").read_text(encoding="utf-8")
    rows = {line[:26].strip(): line[26:].split() for line in text.splitlines()[1:]}
    soft = {name: words[0] for name, words in rows.items() if words}

    def number(name: str) -> int | None:
        value = soft.get(name, "")
        return int(value) if value.isdigit() else None

    return ProcessLimits(
        known=bool(soft),
        memlock=number("Max locked memory"),
        files=number("Max open files"),
        locks=_may_lock(_read_text(root / "proc" / process / "status")),
    )


def container_limits(root: Path = _LIVE) -> ContainerLimits:
    """Return the container that this process is in, with its limits."""
    files = sorted((root / "dev/infiniband").glob("uverbs*"))
    memory = root / "dev/shm"
    shm = os.statvfs(memory) if memory.is_dir() else None
    # The group that fills up first; one without a limit never does.
    counts = sorted(_thread_limits(root), key=lambda each: each[0] - each[1])
    most, now = counts[0] if counts else (None, None)
    return ContainerLimits(
        kind=_container_kind(root),
        pids=most,
        pids_now=now,
        shm=shm.f_frsize * shm.f_blocks if shm else None,
        verbs=len(files),
        verbs_open=sum(map(_can_open, files)),
    )


def _container_kind(root: Path) -> str:
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    # One of LXC or nspawn is a machine of its own, with a systemd that starts the ranks.
    if (word := _read_text(root / "run/systemd/container").strip()) in _SYSTEMD_SAYS:
        return word
    first = _read_text(root / "proc/1/cgroup")
    return next((kind for name, kind in _GROUPS.items() if name in first), "")


def _thread_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and number of processes of each control group that has a limit, upwards."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, names, place = (*line.split(":", 2), "", "")[:3]
        if names not in ("", "pids"):
            continue
        mounted = root / "sys/fs/cgroup" / names
        # Inside of a container its own group is the root of what is mounted.
        folders = (mounted / place.lstrip("/"), *(mounted / place.lstrip("/")).parents)
        for folder in folders:
            if folder.is_relative_to(mounted):
                most, now = (
                    _read_text(folder / f"pids.{what}").strip() for what in ("max", "current")
                )
                if most.isdigit() and now.isdigit():
                    yield int(most), int(now)


def _may_lock(status: str) -> bool | None:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return None if match is None else bool(int(match[1], 16) >> _LOCKS & 1)


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
