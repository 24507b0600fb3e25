"""Say what a build needs and this machine gives: jobs, all that is missing, no network."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from patchkit.finding import Finding
from patchkit.process import attempt
from patchkit.units import BYTES_PER_GIB

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """``title`` says what is built."""

    title: str
    missing: tuple[Finding, ...] = ()

    def require(self) -> None:
        """Raise one error that lists all that is missing."""
        if not self.missing:
            return
        worst = max(self.missing, key=lambda lack: lack.kind.exit_code)
        raise worst.kind(
            f"this machine cannot build {self.title}:\n"
            + "\n".join(f"    {lack.what}: {lack.hint}" for lack in self.missing),
            why="the release's own build would stop there, some of them after an hour",
            hint="install all of these, then run the same command again",
        )


@dataclass(frozen=True, slots=True)
class Jobs:
    """A number of jobs, and the reason in one phrase."""

    number: int
    reason: str


def jobs_for(memory: int, asked: int | None = None) -> Jobs:
    """Return one job per core, or fewer if each needs ``memory`` bytes of what is available."""
    if asked:
        return Jobs(asked, "as asked for")
    # Cores that this process may use; os.cpu_count() ignores affinity and cpusets.
    cores = len(os.sched_getaffinity(0))
    free = available_memory()
    number = max(1, min(cores, free // memory))
    limit = "memory decides" if number < cores else "one a core"
    needs = f"{memory / BYTES_PER_GIB:.0f} GiB a job, {free / BYTES_PER_GIB:.0f} available"
    return Jobs(number, f"{limit}: {cores} cores, {needs}")


def available_memory() -> int:
    """Return how many bytes of memory programs may still take."""
    found = re.search(r"^MemAvailable: +(\d+) kB", _MEMINFO.read_text("ascii"), re.MULTILINE)
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(found[1]) << 10 if found else pages  # in kB, which are KiB here


def network() -> str:
    """Say in a sentence whether a build here is cut off.

    It is not part of a wheel: what is compiled is the same either way, since every source and tool
    was fetched before and is known by its digest.
    """
    if namespace_words():
        return "cut off from the network, in a namespace of its own"
    return (
        "not cut off from the network: this machine lets nobody make network namespaces (Ubuntu: "
        "kernel.apparmor_restrict_unprivileged_userns)"
    )


@cache
def namespace_words() -> tuple[str, ...]:
    """Return what begins a command that has no network; () if no namespace can be made."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    # unshare(1): who is not root makes a network namespace within a user namespace alone.
    rights = () if os.geteuid() == 0 else ("--map-current-user",)
    prefix = (unshare, "--net", *rights, "--")
    # Tried, since AppArmor, sysctls and containers can each forbid it.
    return () if attempt(*prefix, "true").trouble else prefix
