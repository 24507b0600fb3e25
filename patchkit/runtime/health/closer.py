"""Return what only doctor asks a node for, with the reason where it cannot be had. Runs there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from patchkit.process import attempt
from patchkit.runtime.health.compilers import Compilers, compilers
from patchkit.runtime.health.limits import ContainerLimits, ProcessLimits, container, own_limits
from patchkit.runtime.host.machine_root import ToolUnavailable
from patchkit.runtime.host.nvml import GpuState, gpu_state
from patchkit.runtime.python.distributions import distributions, headers

_PINNED = re.compile(r"(?P<name>[\w.-]+)\s*\(?==\s*(?P<version>[\w.+]+)\)?\s*(?:;(?!.*extra).*)?")
_SECONDS = 3.0  # for each program that is asked
_KERNEL_LINES = 400
_KERNEL = "NVRM|Xid|mlx5|AER|Out of memory|oom-kill|oom_reaper|thermal|I/O error|EXT4-fs error"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """What a node says when one looks closer; None or "" is unknown, ``unread`` says why.

    ``page_cache`` is in KiB; ``guards`` are services that kill before memory is used up;
    ``kernel`` are the lines of this boot's kernel log that may tell of trouble; ``synced`` is
    whether the clock is kept right by the network; ``pins`` the versions that vLLM asks for.
    """

    page_cache: int | None = None
    guards: tuple[str, ...] = ()
    kernel: tuple[str, ...] = ()
    synced: bool | None = None
    gpu: GpuState | None = None
    process: ProcessLimits = field(default_factory=ProcessLimits)
    unit: ProcessLimits | None = None
    container: ContainerLimits = field(default_factory=ContainerLimits)
    compilers: Compilers = field(default_factory=Compilers)
    pins: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)


class _UnreadError(Exception):
    """A fact cannot be had, and why."""


def look_closer(venv: str, unit: str = "") -> dict[str, Any]:
    """Return the facts as JSON takes them; ``unit`` is the user's unit whose limits are asked."""
    parts: dict[str, Callable[[], object]] = {
        "page_cache": _page_cache,
        "guards": _guards,
        "kernel": _kernel_log,
        "synced": _synced,
        "gpu": _gpu,
        "process": lambda: own_limits("self"),
        "unit": lambda: _unit_limits(unit),
        "container": container,
        "compilers": lambda: compilers(venv),
        "pins": lambda: _pins(venv),
    }
    found: dict[str, Any] = {}
    unread: dict[str, str] = {}
    with ThreadPoolExecutor(len(parts)) as pool:
        asked = {name: pool.submit(work) for name, work in parts.items()}
        for name, each in asked.items():
            try:
                found[name] = each.result()
            except (_UnreadError, OSError, ValueError) as error:
                unread[name] = str(error)
    return asdict(NodeHealth(**found, unread=unread))


def _page_cache() -> int:
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    sizes = dict(line.split(":", 1) for line in text.splitlines())
    cached = int(sizes["Cached"].split()[0]) - int(sizes["Shmem"].split()[0])
    return cached + int(sizes["Buffers"].split()[0])


def _guards() -> tuple[str, ...]:
    names = ("earlyoom", "systemd-oomd", "nohang")
    said = attempt("systemctl", "is-active", *names, timeout=_SECONDS).output.split()
    if len(said) != len(names):
        raise _UnreadError("systemctl does not say which services run")
    return tuple(name for name, state in zip(names, said, strict=True) if state == "active")


def _kernel_log() -> tuple[str, ...]:
    """Return the lines of the kernel that may tell of trouble; root or group adm may read them."""
    options = ("--dmesg", "--quiet", "--no-pager", "--output=short-iso", f"--grep={_KERNEL}")
    done = attempt("journalctl", *options, "--case-sensitive=true", timeout=_SECONDS)
    if done.started and done.status == 0:
        return tuple(done.output.splitlines()[-_KERNEL_LINES:])
    # With --grep, 1 is also that nothing was found; a reader without rights sees no line at all.
    may_read = os.access("/var/log/journal", os.R_OK | os.X_OK)
    if done.started and done.status == 1 and may_read and not done.errors.strip():
        return ()
    why = done.errors.strip().split("\n")[0] or "only root and the group adm may read it"
    raise _UnreadError(f"the kernel's log: {why}")


def _synced() -> bool:
    done = attempt("timedatectl", "show", "--property=NTPSynchronized", "--value", timeout=_SECONDS)
    if done.output.strip() not in ("yes", "no"):
        raise _UnreadError("timedatectl does not answer")
    return done.output.strip() == "yes"


def _gpu() -> GpuState:
    try:
        return gpu_state()
    except ToolUnavailable as error:
        raise _UnreadError(str(error)) from None


def _pins(venv: str) -> dict[str, str]:
    """Return the packages that the installed vLLM asks for in one version, without its extras."""
    sites = sorted(map(str, Path(venv).glob("lib/python3.*/site-packages"))) if venv else []
    homes = distributions(sites).get("vllm", ())
    lines = headers(homes[0], "Requires-Dist") if homes else ()
    found = (_PINNED.fullmatch(line) for line in lines)
    return {each["name"].lower().replace("_", "-"): each["version"] for each in found if each}


def _unit_limits(unit: str) -> ProcessLimits | None:
    if not unit:
        return None
    words = ("systemctl", "--user", "show", "--property=MainPID", "--value", "--", unit)
    main = attempt(*words, timeout=_SECONDS).output.strip()
    if not main.isdigit() or main == "0":
        raise _UnreadError(f"{unit} does not run")
    return own_limits(main)
