"""Say what a device compiles at first use, and how long that takes it.

Of a fat binary that has no machine code for the device, the driver compiles the PTX, on one core,
when its first kernel is called, and keeps the result in a cache of the user's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from patchkit.target import Load, Target
from patchkit.wheel.device.fatbin import CodeEntry
from patchkit.wheel.device.inspect import Binary, best, fat_binaries

SECONDS_PER_MB = 4.1
"""Seconds that 10**6 bytes of PTX take the driver: 45.9 s for 11.3 MB and 80.2 s for 19.7 MB of
FlashAttention 2, driver 580, one core of an H200's host."""


def first_use(binary: Binary, target: Target) -> tuple[CodeEntry, ...]:
    """Return the PTX that the device compiles, an entry of each fat binary that it is needed of."""
    groups = fat_binaries(binary.live)
    return tuple(
        # The driver takes the newest that the device can have.
        max(
            (e for e in group if e.kind == "ptx" and e.reach(target) is Load.JIT),
            key=lambda entry: (entry.arch.capability, entry.arch.suffix),
        )
        for group in groups
        if best(group, target) is Load.JIT
    )


def compile_seconds(entries: Iterable[CodeEntry]) -> float:
    """Return how long the driver compiles, on one core, if all of them are used."""
    return sum(entry.plain for entry in entries) / 1e6 * SECONDS_PER_MB


def first_use_phrase(entries: Collection[CodeEntry]) -> str:
    """Say what is compiled, and how long that takes: of all, and of the largest."""
    whole, most = (
        compile_seconds(entries),
        compile_seconds([max(entries, key=lambda e: e.plain)]),
    )
    noun = "fat binary is" if len(entries) == 1 else "fat binaries are"
    return (
        f"{len(entries)} {noun} compiled at first use, each on one core: up to "
        f"{most:.0f} s for one, {whole:.0f} s for all"
    )
