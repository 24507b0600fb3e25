"""The walk through MoE configs, on cost functions whose best config is known."""

from __future__ import annotations

import math
from itertools import product

import pytest

from patchkit.measure.tune.search import PARAMETERS, nearest, shared_memory, suited, walk

GB10 = 101_376  # bytes of shared memory per block: 99 KiB


def config(m, n, k, stages, warps=4, group=1):
    return dict(zip(PARAMETERS, (m, n, k, stages, warps, group), strict=True))


SPACE = [
    config(*values)
    for values in product(
        (16, 32, 64, 128, 256),
        (32, 64, 128, 256),
        (64, 128, 256),
        (2, 3, 4, 5),
        (4, 8),
        (1, 16, 64),
    )
]


def never():
    return False


@pytest.mark.parametrize(
    ("chosen", "element_bytes", "expected"),
    [
        (config(64, 128, 128, 4), 1, 3 * 192 * 128),
        (config(64, 128, 128, 4), 2, 2 * 3 * 192 * 128),
        (config(16, 64, 256, 2), 1, 80 * 256),
    ],
)
def test_shared_memory(chosen, element_bytes, expected):
    assert shared_memory(chosen, element_bytes) == expected


@pytest.mark.parametrize(("element_bytes", "most"), [(1, 98_304), (2, 98_304)])
def test_what_fits_into_a_gb10(element_bytes, most):
    kept = suited(SPACE, rows_per_expert=1000, limit=GB10, element_bytes=element_bytes)
    left_out = [c for c in SPACE if c not in kept]

    assert max(shared_memory(c, element_bytes) for c in kept) == most
    assert min(shared_memory(c, element_bytes) for c in left_out) > GB10
    assert kept
    assert left_out


@pytest.mark.parametrize(
    ("rows_per_expert", "tallest"),
    [(0.06, 16), (8, 16), (9, 32), (64, 128), (65, 256), (4096, 256)],
)
def test_tiles_that_would_mostly_pad_are_left_out(rows_per_expert, tallest):
    kept = suited(SPACE, rows_per_expert=rows_per_expert, limit=10**9, element_bytes=1)
    assert max(c["BLOCK_SIZE_M"] for c in kept) == tallest


def test_nearest_to_a_default_outside_the_space():
    default = {**config(16, 64, 32, 4, group=8), "SPLIT_K": 1}
    assert nearest(SPACE, default) == config(16, 64, 64, 4, group=16)
    # A default that leaves parameters out is compared by the others.
    assert nearest(SPACE, {"BLOCK_SIZE_M": 64})["BLOCK_SIZE_M"] == 64


def test_walk_reaches_a_best_config_that_is_one_change_at_a_time_away():
    best = config(64, 128, 256, 3, 8, 16)

    def cost(c):
        return 10 + sum(abs(math.log2(c[name] / best[name])) for name in PARAMETERS)

    found = walk(SPACE, config(16, 32, 64, 2), cost, most=500, expired=never)
    assert (found.config, found.microseconds, found.complete) == (best, 10, True)
    assert found.measured < len(SPACE) / 2


def test_walk_leaves_a_valley_that_only_two_changes_lead_out_of():
    start, best = config(16, 64, 128, 4), config(32, 64, 128, 4, 8)

    def cost(c):
        return {True: 1.0}.get(c == best, 2.0 if c == start else 3.0)

    assert walk(SPACE, start, cost, most=500, expired=never).config == best


def test_walk_stops_at_the_limit_and_keeps_its_best():
    asked = []

    def cost(c):
        asked.append(c)
        return float(-len(asked))

    found = walk(SPACE, SPACE[0], cost, most=7, expired=never)
    assert (found.measured, len(asked), found.complete) == (7, 7, False)
    assert found.config == asked[-1]


def test_walk_stops_when_time_is_up():
    left = iter([False, False, False])
    found = walk(SPACE, SPACE[0], lambda c: 1.0, most=99, expired=lambda: next(left, True))
    assert (found.config, found.measured, found.complete) == (SPACE[0], 3, False)


def test_walk_goes_on_when_the_start_cannot_run():
    start = SPACE[0]
    found = walk(SPACE, start, lambda c: math.inf if c == start else 5.0, most=9, expired=never)
    assert found.config not in (None, start)


def test_walk_where_nothing_runs():
    found = walk(SPACE[:9], SPACE[0], lambda c: math.inf, most=99, expired=never)
    assert (found.config, found.microseconds) == (None, math.inf)


def test_no_config_is_measured_twice():
    asked = []
    walk(
        SPACE[:60],
        SPACE[0],
        lambda c: asked.append(tuple(c.values())) or 1.0,
        most=99,
        expired=never,
    )
    assert len(asked) == len(set(asked)) > 5
