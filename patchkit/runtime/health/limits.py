"""Read what limits a process: memory that it may lock, processes, a container around it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PODMAN, _DOCKER = Path("/run/.containerenv"), Path("/.dockerenv")
_UVERBS = Path("/dev/infiniband")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Limits of a process: bytes that it may lock and open files; None for no limit."""

    known: bool = False
    memlock: int | None = None
    files: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerLimits:
    """What a container gives: ``kind`` is docker, podman or "" outside of one.

    ``pids`` is the most processes and threads, ``pids_now`` how many there are, ``shm`` the size of
    /dev/shm in bytes; ``verbs`` how many RDMA devices have a file in /dev/infiniband, and
    ``verbs_open`` how many of them this user may open.
    """

    kind: str = ""
    pids: int | None = None
    pids_now: int | None = None
    shm: int | None = None
    verbs: int = 0
    verbs_open: int = 0


def own_limits(process: str) -> ProcessLimits:
    """Return the limits of a process of this user: its number, or ``self``. Raises OSError."""
    text = Path("/proc", process, "limits").read_text(encoding="utf-8")
    rows = {line[:26].strip(): line[26:].split() for line in text.splitlines()[1:]}
    soft = {name: words[0] for name, words in rows.items() if words}

    def number(name: str) -> int | None:
        value = soft.get(name, "")
        return int(value) if value.isdigit() else None

    return ProcessLimits(
        known=True, memlock=number("Max locked memory"), files=number("Max open files")
    )


def container() -> ContainerLimits:
    """Return the container that this process is in, with its limits."""
    kind = "podman" if _PODMAN.exists() else "docker" if _DOCKER.exists() else ""
    files = sorted(_UVERBS.glob("uverbs*")) if _UVERBS.is_dir() else []
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None  # noqa: S108
    return ContainerLimits(
        kind=kind,
        pids=_pids("max"),
        pids_now=_pids("current"),
        shm=shm.f_frsize * shm.f_blocks if shm else None,
        verbs=len(files),
        verbs_open=sum(map(_opens, files)),
    )


def _pids(what: str) -> int | None:
    """Return a number of the control group for processes, of either version of them."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, names, place = line.split(":", 2)
        if names in ("", "pids"):
            folder = Path("/sys/fs/cgroup", names, place.lstrip("/"))
            # Inside of a container its own group is the root of what is mounted.
            for file in (folder / f"pids.{what}", Path("/sys/fs/cgroup", names, f"pids.{what}")):
                if file.is_file():
                    text = file.read_text(encoding="utf-8").strip()
                    return int(text) if text.isdigit() else None
    return None


def _opens(file: Path) -> bool:
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True
