"""Select the fused-MoE configs that a device can run, and walk to a good one. Pure, no GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

Config = Mapping[str, int]

# Most influential first: the walk changes them in this order.
PARAMETERS = (
    "BLOCK_SIZE_M",
    "BLOCK_SIZE_N",
    "BLOCK_SIZE_K",
    "num_stages",
    "num_warps",
    "GROUP_SIZE_M",
)
# Parameters changed at once: pairs lead out of the valleys that single changes end in.
_REACH = 2


@dataclass(frozen=True, slots=True)
class WalkResult:
    """Where a walk ended: the best config and its microseconds, None if none ran.

    ``complete`` is false if the walk was cut short: there may be a better neighbour.
    """

    config: Config | None
    microseconds: float
    measured: int
    complete: bool


def shared_memory(config: Config, element_bytes: int) -> int:
    """Return the bytes of shared memory per block that Triton's pipelined MoE kernel needs.

    One stage is in registers, so ``num_stages - 1`` tiles of A and B are buffered.
    """
    tiles = config["BLOCK_SIZE_M"] + config["BLOCK_SIZE_N"]
    return (config["num_stages"] - 1) * tiles * config["BLOCK_SIZE_K"] * element_bytes


def suited(
    space: Iterable[Config], *, rows_per_expert: float, limit: int, element_bytes: int
) -> list[Config]:
    """Return the configs that fit into ``limit`` bytes and do not mostly pad.

    A tile taller than twice the rows that an expert gets on average only computes padding and is
    the slowest to compile; 16 rows are the least a tensor core takes.
    """
    power_of_two = 1 << math.ceil(math.log2(max(1, rows_per_expert)))  # the next one
    tallest = max(16, 2 * power_of_two)
    return [
        config
        for config in space
        if shared_memory(config, element_bytes) <= limit and config["BLOCK_SIZE_M"] <= tallest
    ]


def nearest(space: Iterable[Config], wanted: Config) -> Config:
    """Return the config of ``space`` with the fewest doublings between it and ``wanted``."""

    def doublings(config: Config) -> float:
        pairs = ((config[name], wanted.get(name, config[name])) for name in PARAMETERS)
        return sum(abs(math.log2(one / other)) for one, other in pairs)

    return min(space, key=doublings)


def walk(
    space: Iterable[Config],
    start: Config,
    measure: Callable[[Config], float],
    *,
    most: int,
    expired: Callable[[], bool],
) -> WalkResult:
    """Improve until no change of one or two parameters does, ``most`` are measured, or time is up.

    ``measure`` returns microseconds, infinity for a config that cannot run. No config is measured
    twice.
    """
    configs = list(space)
    known: dict[tuple[int, ...], float] = {}
    best, least = start, math.inf
    improved = True
    while improved:
        improved = False
        for config in [start] if not known else _neighbours(configs, best):
            if (key := _key(config)) in known:
                continue
            if len(known) >= most or expired():
                return _found(best, least, known, complete=False)
            known[key] = measure(config)
            if known[key] < least:  # walk on from there: to measure all neighbours takes long
                best, least, improved = config, known[key], True
                break
        else:
            # The start itself may not run; its neighbours may.
            improved = len(known) == 1 and math.isinf(least)
    return _found(best, least, known, complete=True)


def _found(
    best: Config, least: float, known: Mapping[tuple[int, ...], float], *, complete: bool
) -> WalkResult:
    return WalkResult(None if math.isinf(least) else best, least, len(known), complete)


def _neighbours(space: list[Config], config: Config) -> list[Config]:
    """Return configs that differ in one parameter, the most influential first, then in two."""
    apart = [[name for name in PARAMETERS if other[name] != config[name]] for other in space]
    near = [(names, other) for names, other in zip(apart, space, strict=True) if names]
    rank = {name: number for number, name in enumerate(PARAMETERS)}
    near.sort(key=lambda pair: (len(pair[0]), [rank[name] for name in pair[0]]))
    return [other for names, other in near if len(names) <= _REACH]


def _key(config: Config) -> tuple[int, ...]:
    return tuple(config[name] for name in PARAMETERS)
