"""Judge whether a server lives, by its signs of life. Pure.

The watch on the head, `status` and `up` judge by this one table. What a row says counts above all
rows below it: a token that came proves that the engine works, whatever else is silent; one that
does not come weighs more than gauges that move. This file is copied to the nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from patchkit.foreign import read_count

ANSWERS, LIVES, WORKS, BLIND = "answers", "lives", "works", "blind"
ENDED, DOUBT = "ended", "doubt"
_STATES = (ANSWERS, LIVES, WORKS, BLIND, ENDED, DOUBT)
_MOST = 1e9  # requests
_GAUGES_COUNT = 4.0  # times `frozen`: how long a prefill by chunks may keep a token waiting

# `record` in vLLM's v1/metrics/loggers.py, 0.11.0 to 0.33.0. A step counts what it gave. A chunk of
# a prefill gives nothing and counts no iteration, but the cache fills. What waits is no sign of
# life: clients make it move, and so does a scheduler that asks the prefix cache in vain.
_STEPS = ("iteration_tokens_total_count", "generation_tokens_total", "prompt_tokens_total")
_RUNNING = "num_requests_running"
_GAUGES = ("kv_cache_usage_perc", _RUNNING)
_WAITING = "num_requests_waiting"
_COUNT = re.compile(
    rf"^vllm:({'|'.join((*_STEPS, *_GAUGES, _WAITING))})(?:\{{.*\}})? (\S+)$", re.MULTILINE
)
# One open end in a pattern: with two, a hostile line takes hours.
_NOT_IN_STATE = re.compile(r"^vllm:engine_sleep_state\{(.*)\} 0(?:\.0)?$", re.MULTILINE)
_AWAKE = 'sleep_state="awake"'


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What a text of /metrics says of the engines: each name's sum over all of them."""

    steps: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    requests: int | None = None
    asleep: bool = False

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.steps or self.gauges)


@dataclass(frozen=True, kw_only=True)
class ServerSigns:
    """What is known of a server at one moment; what was not looked at is as by default.

    ``strangers`` are others who listen at its port, ``closed`` says that nobody does. ``token``
    says that one came; ``waited`` is for how many seconds one is waited for, ``refusal`` why there
    was none. ``counters`` says that /metrics has some, ``silence`` what did not answer, and why;
    ``steps`` and ``gauges`` moved since the last look. ``busy``: somebody asks it. ``work`` is what
    shows outside the server that a node works, such as a compiler.
    """

    strangers: str = ""
    closed: bool = False
    token: bool = False
    waited: float = 0.0
    refusal: str = ""
    counters: bool = True
    silence: str = ""
    steps: bool = False
    gauges: bool = False
    asleep: bool = False
    paused: bool = False
    busy: bool = True
    requests: int | None = None
    work: str = ""


@dataclass(frozen=True)
class ServerLife:
    """How a server is: one of the states, and the sign for it in words.

    ``answers``: a token came; ``lives``: the server shows it otherwise; ``works``: something beside
    it does; ``blind``: what answers may be another server; ``ended``: nobody listens; ``doubt``:
    nothing shows that it lives.
    """

    state: str
    text: str

    @property
    def proof(self) -> str:
        """Return what keeps a server from being killed, "" for nothing."""
        return "" if self.state in (ENDED, DOUBT) else self.text

    @property
    def line(self) -> str:
        """Return it as the watch tells systemd: one line, whatever others wrote into it."""
        return f"{self.state}: {' '.join(self.text.split())}"


def judge(seen: ServerSigns, frozen: float) -> ServerLife:
    """Return what the signs amount to; ``frozen`` are the seconds of the cluster's file."""
    waiting = bool(seen.waited or seen.refusal)
    prefill = seen.gauges and seen.waited < _GAUGES_COUNT * frozen
    silent = bool(seen.silence)
    rows = (
        (bool(seen.strangers), BLIND, f"not only the model listens: {seen.strangers}"),
        (seen.token, ANSWERS, "a token came"),
        (seen.closed, ENDED, "nobody listens: the connection is refused"),
        (seen.steps, LIVES, "its counters move"),
        (prefill, LIVES, "its gauges move"),
        (not silent and not seen.counters, LIVES, "it has no counters, and answers"),
        (not silent and seen.asleep, LIVES, "it sleeps"),
        (seen.paused, LIVES, "it is paused"),
        (not silent and not seen.busy and not waiting, LIVES, "it has nothing to do"),
        (bool(seen.work), WORKS, seen.work),
    )
    lives = (ServerLife(state, text) for holds, state, text in rows if holds)
    return next(lives, ServerLife(DOUBT, _describe_doubt(seen)))


def _describe_doubt(seen: ServerSigns) -> str:
    count = "an unknown number of" if seen.requests is None else seen.requests
    parts = [seen.silence or f"{count} requests, and no step"]
    if seen.refusal:
        parts.append(f"no token: {seen.refusal}")
    elif seen.waited:
        parts.append(f"a token that was asked for {seen.waited:.0f} s ago does not come")
    return "; ".join(parts)


def describe_silence(path: str, trouble: str) -> str:
    """Return what did not answer, and why; "" where it did."""
    return f"{path} does not answer: {trouble}" if trouble else ""


def read_counters(text: str) -> Counters:
    """Return what engines count; what is no finite number from 0 on is left out."""
    sums: dict[str, float] = {}
    for name, value in _COUNT.findall(text):
        try:
            sums[name] = sums.get(name, 0.0) + read_count(value)
        except ValueError:
            continue
    running = sums.get(_RUNNING)
    requests = None if running is None else running + sums.get(_WAITING, 0.0)
    return Counters(
        steps={name: sums[name] for name in _STEPS if name in sums},
        gauges={name: sums[name] for name in _GAUGES if name in sums},
        requests=None if requests is None else round(min(requests, _MOST)),
        asleep=any(_AWAKE in labels for labels in _NOT_IN_STATE.findall(text)),
    )


def has_moved(figures: Mapping[str, float], former: Mapping[str, float]) -> bool:
    """Return whether a figure is another one than before; one that is new has not moved."""
    return any(former.get(name, figure) != figure for name, figure in figures.items())


def read_life(line: str) -> ServerLife | None:
    """Return the life of a watch by what it told systemd; None for anything else."""
    state, sign, text = line.partition(": ")
    return ServerLife(state, text) if sign and state in _STATES else None
