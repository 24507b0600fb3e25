"""Find the PTX that the driver compiles at first use, and estimate how long that takes.

If a fat binary has no machine code for the device, the driver compiles its PTX when the first of
its kernels is called. It uses one core, and keeps the result in a cache of the user.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from operator import attrgetter

from patchkit.target import Load, Target
from patchkit.wheel.device.fatbin import CodeEntry
from patchkit.wheel.device.inspect import Binary, best_reach

SECONDS_PER_MB = 4.1
"""Seconds that the driver needs for 10**6 bytes of PTX.

Measured with FlashAttention 2, driver 580, one core of an H200's host: 45.9 s for 11.3 MB, 80.2 s
for 19.7 MB.
"""


def jit_entries(binary: Binary, target: Target) -> tuple[CodeEntry, ...]:
    """Return the PTX that the driver compiles for the device: one entry for each such fat binary.

    Only live fat binaries count, and those that have no machine code for the device.
    """
    return tuple(
        _newest_ptx(group, target)
        for group in binary.fat_binaries
        if best_reach(group, target) is Load.JIT
    )


def _newest_ptx(group: Iterable[CodeEntry], target: Target) -> CodeEntry:
    """Return the PTX that the driver compiles: the one for the newest arch that the device runs."""
    usable = [
        entry
        for entry in group
        if entry.kind == "ptx" and entry.reach(target) is Load.JIT
    ]
    return max(usable, key=attrgetter("arch.capability", "arch.suffix"))


def compile_seconds(entries: Iterable[CodeEntry]) -> float:
    """Return an estimate of the seconds that the driver needs for all entries, on one core."""
    return sum(entry.unpacked_size for entry in entries) / 1e6 * SECONDS_PER_MB


def first_use_phrase(entries: Collection[CodeEntry]) -> str:
    """Return a phrase: how many fat binaries are compiled, and the seconds for one and for all.

    ``entries`` must not be empty.
    """
    noun = "fat binary is" if len(entries) == 1 else "fat binaries are"
    longest = max(compile_seconds([entry]) for entry in entries)
    return (
        f"{len(entries)} {noun} compiled at first use, each on one core: up to "
        f"{longest:.0f} s for one, {compile_seconds(entries):.0f} s for all"
    )
