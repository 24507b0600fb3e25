"""The one table by which the watch, `status` and `up` judge a server: signs in, life out."""

import pytest

from patchkit.cluster.agent.judge import (
    ANSWERS,
    BLIND,
    DOUBT,
    ENDED,
    LIVES,
    REFUSES,
    WORKS,
    ServerLife,
    ServerSigns,
    has_moved,
    judge,
    read_counters,
    read_life,
)

FROZEN = 120.0
SILENT = "/metrics does not answer: no answer in 20 s"
LIVES_BY_SIGNS = {  # what is seen → state
    "a token, though all else is silent": (
        {"token_came": True, "metrics_trouble": SILENT},
        ANSWERS,
    ),
    "a token, though one was waited for long": (
        {"token_came": True, "token_wait_s": 900.0},
        ANSWERS,
    ),
    "steps": ({"steps_moved": True, "token_wait_s": 900.0}, LIVES),
    "a prefill fills the cache": ({"gauges_moved": True, "token_wait_s": 300.0}, LIVES),
    "gauges move, and the token never comes": (
        {"gauges_moved": True, "token_wait_s": 481.0},
        DOUBT,
    ),
    "requests that wait, and no token": ({"token_wait_s": 31.0, "requests": 11}, DOUBT),
    "the question is refused": ({"question_refusal": "HTTP 401"}, REFUSES),
    "no counters, and a token is late": (
        {"has_counters": False, "token_wait_s": 300.0},
        LIVES,
    ),
    "no counters, and no token": (
        {"has_counters": False, "token_wait_s": 481.0},
        DOUBT,
    ),
    "no counters, and the engine's error": (
        {"has_counters": False, "token_refusal": "HTTP 500"},
        DOUBT,
    ),
    "no counters": ({"has_counters": False}, LIVES),
    "a late answer, and a token is late": (
        {"is_late": True, "token_wait_s": 300.0},
        LIVES,
    ),
    "a late answer, and no token": ({"is_late": True, "token_wait_s": 481.0}, DOUBT),
    "a late answer, and the engine's error": (
        {"is_late": True, "token_refusal": "HTTP 500"},
        DOUBT,
    ),
    "a late answer with an error": (
        {"is_late": True, "metrics_trouble": "/metrics says 500"},
        DOUBT,
    ),
    "no answer, and so no counters": (
        {"has_counters": False, "metrics_trouble": SILENT},
        DOUBT,
    ),
    "asleep": ({"asleep": True, "token_wait_s": 99.0}, LIVES),
    "paused": ({"paused": True, "token_wait_s": 99.0}, LIVES),
    "nobody asks": ({"has_clients": False}, LIVES),
    "nobody asks, and the token does not come": (
        {"has_clients": False, "token_wait_s": 31.0},
        DOUBT,
    ),
    "nobody asks, and the token was refused": (
        {"has_clients": False, "token_refusal": "500"},
        DOUBT,
    ),
    "a compiler, and nothing else": (
        {"token_wait_s": 200.0, "work": "ptxas compiles"},
        WORKS,
    ),
    "nobody listens, whatever else works": (
        {"refused": True, "work": "ptxas compiles"},
        ENDED,
    ),
    "another listens, and answers": (
        {"other_listeners": "port 8000: x", "token_came": True},
        BLIND,
    ),
}


@pytest.mark.parametrize("name", LIVES_BY_SIGNS)
def test_what_evidence_amounts_to(name):
    seen, state = LIVES_BY_SIGNS[name]
    life = judge(ServerSigns(**seen), FROZEN)
    assert life.state == state
    assert bool(life.proof) == (state not in (ENDED, DOUBT))
    assert read_life(life.line) == life


@pytest.mark.parametrize(
    ("state", "value", "asleep"),
    [("awake", "0.0", True), ("awake", "1.0", False), ("off", "0", False)],
)
def test_an_engine_that_sleeps(state, value, asleep):
    line = f'vllm:engine_sleep_state{{engine="0",sleep_state="{state}",model_name="a}}"}} {value}\n'
    assert read_counters(line).asleep is asleep


RUNNING = "vllm:num_requests_running"
TOKENS = "vllm:generation_tokens_total"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # An engine's number that comes and goes is no step of another, which hangs.
        (
            [f'{TOKENS}{{e="0"}} 5', f'{TOKENS}{{e="1"}} NaN'],
            [f'{TOKENS}{{e="0"}} 5', f"{TOKENS} 7"],
        ),
        ([f"{TOKENS} 5", f"{TOKENS} 7"], [f"{TOKENS} 5", f"{TOKENS} -1"]),
        (
            [f"{TOKENS} 1e308", f"{TOKENS} 1e308"],
            [f"{TOKENS} 1e308", f"{TOKENS} 1e308"],
        ),
    ],
)
def test_an_odd_number_is_no_step(before, after):
    former, counters = (read_counters("\n".join(rows)) for rows in (before, after))
    assert former
    assert counters
    assert not has_moved(counters.steps, former.steps)


@pytest.mark.parametrize("value", ["NaN", "-1", "inf", "1e999"])
def test_an_odd_number_hides_how_many_ask(value):
    for rows in (
        (f"{RUNNING} 0", f"vllm:num_requests_waiting {value}"),
        (f"{RUNNING} {value}",),
    ):
        counters = read_counters("\n".join(rows))
        assert counters.requests is None
        assert counters


@pytest.mark.parametrize(("other", "asleep"), [("1.0", False), ("0.0", True)])
def test_one_engine_that_sleeps_says_nothing_of_another(other, asleep):
    rows = (
        f'vllm:engine_sleep_state{{engine="{engine}",sleep_state="awake"}} {value}\n'
        for engine, value in enumerate(("0.0", other))
    )
    assert read_counters("".join(rows)).asleep is asleep


def test_labels_without_an_end_are_read_once():
    """Where each label was tried with each end, these took hours: 8 MiB in one line."""
    labels = 'sleep_state="awake"' * (8 << 20 >> 5)
    assert not read_counters(f"vllm:engine_sleep_state{{{labels}\n")


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (
            {"metrics_trouble": SILENT, "token_refusal": "HTTP 500"},
            f"{SILENT}; no token: HTTP 500",
        ),
        (
            {"requests": 11, "token_wait_s": 31.0},
            "11 requests, and no step; no token in the 31 s since one was asked for",
        ),
    ],
)
def test_a_doubt_names_what_is_missed(seen, text):
    assert judge(ServerSigns(**seen), FROZEN).text == text


@pytest.mark.parametrize(
    "line", ["", "waiting for spark2: no answer", "lives", "other: text"]
)
def test_what_is_no_verdict(line):
    assert read_life(line) is None


def test_a_pause_is_named_though_there_are_no_counters():
    """`up` ends for a server that is paused, and waits for one that is only not counted."""
    signs = ServerSigns(paused=True, has_counters=False, token_wait_s=31.0)
    assert judge(signs, FROZEN).text == "it is paused"


def test_a_verdict_is_one_line_for_systemd():
    assert ServerLife(DOUBT, "a\nWATCHDOG=1").line == "doubt: a WATCHDOG=1"
