"""Choose how many compilers run at once: as many as cores and memory allow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from patchkit.units import BYTES_PER_GIB

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Jobs:
    """A number of jobs, and the reason in one phrase."""

    number: int
    reason: str


def jobs_for(memory: int) -> Jobs:
    """Return one job per core, or fewer if each needs ``memory`` bytes of what is available."""
    # Cores that this process may use; os.cpu_count() ignores affinity and cpusets.
    cores, free = len(os.sched_getaffinity(0)), available_memory()
    number = max(1, min(cores, free // memory))
    limit = "memory decides" if number < cores else "one a core"
    needs = f"{memory / BYTES_PER_GIB:.0f} GiB a job, {free / BYTES_PER_GIB:.0f} available"
    return Jobs(number, f"{limit}: {cores} cores, {needs}")


def available_memory() -> int:
    """Return the bytes that programs can still have without swapping, as Linux estimates."""
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10  # in kB, which are KiB here
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
