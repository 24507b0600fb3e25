"""Find the PTX that a device compiles at first use, and say how long that takes.

If a fat binary has no machine code for the device, the driver compiles its PTX when the first
kernel is called, on one core, and keeps the result in a cache of the user.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from operator import attrgetter

from patchkit.target import Load, Target
from patchkit.wheel.device.fatbin import CodeEntry
from patchkit.wheel.device.inspect import Binary, best_reach

SECONDS_PER_MB = 4.1
"""Seconds that 10**6 bytes of PTX take the driver: 45.9 s for 11.3 MB and 80.2 s for 19.7 MB of
FlashAttention 2, driver 580, one core of an H200's host."""


def jit_entries(binary: Binary, target: Target) -> tuple[CodeEntry, ...]:
    """Return the PTX that the driver compiles for the device, one entry of each fat binary."""
    return tuple(
        _newest_ptx(group, target)
        for group in binary.fat_binaries
        if best_reach(group, target) is Load.JIT
    )


def _newest_ptx(group: Iterable[CodeEntry], target: Target) -> CodeEntry:
    """Return the PTX that the driver compiles: that of the newest arch that the device can run."""
    usable = [
        entry
        for entry in group
        if entry.kind == "ptx" and entry.reach(target) is Load.JIT
    ]
    return max(usable, key=attrgetter("arch.capability", "arch.suffix"))


def compile_seconds(entries: Iterable[CodeEntry]) -> float:
    """Return how long the driver compiles, on one core, if all of them are used."""
    return sum(entry.unpacked_size for entry in entries) / 1e6 * SECONDS_PER_MB


def first_use_phrase(entries: Collection[CodeEntry]) -> str:
    """Say how many are compiled, and how long the largest takes and all of them."""
    noun = "fat binary is" if len(entries) == 1 else "fat binaries are"
    longest = max(compile_seconds([entry]) for entry in entries)
    return (
        f"{len(entries)} {noun} compiled at first use, each on one core: up to "
        f"{longest:.0f} s for one, {compile_seconds(entries):.0f} s for all"
    )
