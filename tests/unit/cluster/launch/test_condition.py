"""Say what is wrong with a server that gives no token, and what becomes of it."""

import pytest

from patchkit.cluster.agent.judge import (
    BLIND,
    DOUBT,
    ENDED,
    LIVES,
    PAUSED,
    REFUSES,
    WORKS,
    ServerLife,
)
from patchkit.cluster.launch.up import is_unwatched, standstill_error
from support.clusters import cluster, unit

GUARD = "patchkit-vllm-alive.service"
NONE = "no sign of life for 70 s"
HANGS = ServerLife(DOUBT, "no answer in 30 s")
CASES = {  # life, the unit that watches, choices → words of the error, and its next step
    "watched": (
        HANGS,
        "active",
        {},
        "after 120 s without a sign of life",
        "patchkit status",
    ),
    "its doubt": (HANGS, "active", {}, f"({NONE})", "patchkit status"),
    "unwatched": (HANGS, "failed", {}, "nothing watches it", "patchkit down"),
    "never watched": (
        HANGS,
        "inactive",
        {"frozen": 0},
        "nothing watches it",
        "patchkit down",
    ),
    "ended": (
        ServerLife(ENDED, "closed"),
        "active",
        {},
        "systemd starts all",
        "patchkit status",
    ),
    "refuses": (
        ServerLife(REFUSES, "it refuses the question: HTTP 401"),
        *("active", {}, "VLLM_API_KEY", "patchkit doctor --cluster"),
    ),
    "another": (
        ServerLife(BLIND, "x listens"),
        "active",
        {},
        "the key goes to nobody",
        "ss -ltnp",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_becomes_of_a_server_without_a_token(name):
    life, active, choices, words, hint = CASES[name]
    guard = unit(active, unit=GUARD, text=f"doubt: {NONE}")
    error = standstill_error(cluster("spark-1", **choices), life, guard)
    assert words in error.why
    assert hint in error.hint
    assert ("hangs" in error.what) == (life is HANGS)


@pytest.mark.parametrize(
    ("life", "says"),
    [
        (ServerLife(WORKS, "spark-2: ptxas compiles"), ""),
        (ServerLife(LIVES, "its counters move"), ""),
        (ServerLife(LIVES, PAUSED), "it is paused, and gives no token"),
        (HANGS, "the model hangs"),
    ],
)
def test_up_waits_for_what_works_and_for_nothing_else(life, says):
    guard = unit(unit=GUARD)
    error = standstill_error(cluster("spark-1"), life, guard)
    assert (says in error.what) if says else error is None


@pytest.mark.parametrize(
    ("active", "off"),
    [
        ("active", False),
        ("activating", False),  # it gives workers the compiled code
        ("deactivating", False),  # it lets the ranks write where they are
        ("inactive", True),
        ("failed", True),
    ],
)
def test_a_watch_that_is_off(active, off):
    assert is_unwatched(cluster("a"), unit(active, unit=GUARD)) is off
    assert not is_unwatched(cluster("a", frozen=0), unit(active, unit=GUARD))
