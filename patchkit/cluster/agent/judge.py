"""Judge whether a server lives, by its signs of life. Pure.

The watch on the head, `status` and `up` judge by the one table in ``judge``: its first row that
holds decides. Another listener comes first, then a token: it proves that the engine works, whatever
else is silent. A token that does not come weighs more than gauges that move. This file is copied to
the nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from patchkit.foreign import read_count

ANSWERS = "answers"
LIVES = "lives"
WORKS = "works"
BLIND = "blind"
REFUSES = "refuses"
ENDED = "ended"
DOUBT = "doubt"
SLEEPS = "it sleeps"
PAUSED = "it is paused"
_STATES = (ANSWERS, LIVES, WORKS, BLIND, REFUSES, ENDED, DOUBT)
_MOST = 1e9  # requests
_SERVER_ERRORS = 500  # the status of HTTP from which on the server itself is in trouble
_NO_SUCH_QUESTION = 501
_PREFILL = 4.0  # times `frozen`: how long a prefill by chunks may keep a token waiting

# `record` in vLLM's v1/metrics/loggers.py, 0.11.0 to 0.33.0. A step counts the tokens that it gave.
# A chunk of a prefill gives none and counts no iteration, but the cache fills. Requests that wait
# are no sign of life: clients change their number, and so does a scheduler that asks the prefix
# cache in vain.
_STEPS = (
    "iteration_tokens_total_count",
    "generation_tokens_total",
    "prompt_tokens_total",
)
_RUNNING = "num_requests_running"
_GAUGES = ("kv_cache_usage_perc", _RUNNING)
_WAITING = "num_requests_waiting"
_COUNT = re.compile(
    rf"^vllm:({'|'.join((*_STEPS, *_GAUGES, _WAITING))})(?:\{{.*\}})? (\S+)$",
    re.MULTILINE,
)
# One open end in a pattern: with two, a hostile line takes hours.
_SLEEP_STATE = re.compile(r"^vllm:engine_sleep_state\{(.*)\} (\S+)$", re.MULTILINE)
_AWAKE = 'sleep_state="awake"'
_NO = ("0", "0.0")


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The counters in a text of /metrics: for each name the sum over all engines.

    ``odd`` are names without a sum, since an engine's value is no finite number from 0 on.
    ``asleep`` says that all engines sleep.
    """

    steps: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    requests: int | None = None
    asleep: bool = False
    odd: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.steps or self.gauges or self.odd)


@dataclass(frozen=True, kw_only=True)
class ServerSigns:
    """The signs of a server at one moment; a sign that was not looked at has its default.

    ``other_listeners`` listen at its port beside it, ``refused`` says that nobody does.
    ``token_wait_s`` are the seconds since a token was asked for, ``token_refusal`` says why the
    engine gave none. ``question_refusal``: the question was refused, which says nothing of the
    engine. ``has_counters`` says that /metrics has some, ``metrics_trouble`` why it says nothing at
    all; steps and gauges moved since the last look. ``has_clients``: somebody asks it. ``work`` is
    a sign outside the server that a node works, such as a compiler.
    """

    other_listeners: str = ""
    refused: bool = False
    token_came: bool = False
    token_wait_s: float = 0.0
    token_refusal: str = ""
    question_refusal: str = ""
    has_counters: bool = True
    metrics_trouble: str = ""
    steps_moved: bool = False
    gauges_moved: bool = False
    asleep: bool = False
    paused: bool = False
    has_clients: bool = True
    requests: int | None = None
    work: str = ""

    @property
    def asked_in_vain(self) -> bool:
        """Return whether a token was asked for and did not come."""
        return bool(self.token_wait_s or self.token_refusal)


@dataclass(frozen=True)
class ServerLife:
    """One of the states of a server, and the sign for it in words.

    ``answers``: a token came; ``lives``: the server shows life otherwise; ``works``: something
    beside it does; ``blind``: another server may answer; ``refuses``: it does not take the
    question; ``ended``: nobody listens; ``doubt``: nothing shows that it lives.
    """

    state: str
    text: str

    @property
    def proof(self) -> str:
        """Return the sign that keeps a server from being killed, "" for none."""
        if self.state in (ENDED, DOUBT):
            return ""
        return self.text

    @property
    def line(self) -> str:
        """Return the line of a watch to systemd: without line breaks of whoever wrote the text."""
        return f"{self.state}: {' '.join(self.text.split())}"


def judge(signs: ServerSigns, frozen: float) -> ServerLife:
    """Return the life that the signs show; ``frozen`` are the seconds of the cluster's file."""
    metrics_answer = not signs.metrics_trouble
    is_patient = signs.token_wait_s < _PREFILL * frozen

    # A server that counts nothing shows no prefill either.
    is_uncounted = metrics_answer and not signs.has_counters and not signs.token_refusal
    is_idle = metrics_answer and not signs.has_clients and not signs.asked_in_vain

    strangers = f"not only the model listens: {signs.other_listeners}"
    refusal = f"it refuses the question: {signs.question_refusal}"
    no_counters = "it answers /metrics, which has no counters"

    rows = (
        (signs.other_listeners, BLIND, strangers),
        (signs.token_came, ANSWERS, "a token came"),
        (signs.refused, ENDED, "nobody listens: the connection is refused"),
        (signs.question_refusal, REFUSES, refusal),
        (signs.steps_moved, LIVES, "its counters move"),
        (signs.gauges_moved and is_patient, LIVES, "its gauges move"),
        (metrics_answer and signs.asleep, LIVES, SLEEPS),
        (signs.paused, LIVES, PAUSED),
        (is_uncounted and is_patient, LIVES, no_counters),
        (is_idle, LIVES, "it has nothing to do"),
        (signs.work, WORKS, signs.work),
    )

    for holds, state, text in rows:
        if holds:
            return ServerLife(state, text)
    return ServerLife(DOUBT, _describe_doubt(signs))


def _describe_doubt(signs: ServerSigns) -> str:
    count: object = signs.requests
    if signs.requests is None:
        count = "an unknown number of"
    parts = [signs.metrics_trouble or f"{count} requests, and no step"]

    if signs.token_refusal:
        parts.append(f"no token: {signs.token_refusal}")
    elif signs.token_wait_s:
        wait = f"{signs.token_wait_s:.0f} s"
        parts.append(f"no token in the {wait} since one was asked for")
    return "; ".join(parts)


def describe_trouble(
    path: str,
    status: int,
    trouble: str,
) -> str:
    """Return why a path says nothing of the server; "" where it answers."""
    if trouble:
        return f"{path} does not answer: {trouble}"
    if status >= _SERVER_ERRORS:
        return f"{path} says {status}"
    return ""


def is_question_refused(status: int) -> bool:
    """Return whether a status refuses the question itself, which says nothing of the engine."""
    if status == _NO_SUCH_QUESTION:
        return True
    return status not in (0, 200) and status < _SERVER_ERRORS


def read_counters(text: str) -> Counters:
    """Return the counters of the engines; a name with an odd value has no sum to compare."""
    sums: dict[str, float] = {}
    odd = set()
    for name, value in _COUNT.findall(text):
        try:
            sums[name] = sums.get(name, 0.0) + read_count(value)
        except ValueError:
            odd.add(name)

    for name in odd:
        sums.pop(name, None)

    requests = None
    if _RUNNING in sums and _WAITING not in odd:
        count = sums[_RUNNING] + sums.get(_WAITING, 0.0)
        requests = round(min(count, _MOST))

    return Counters(
        steps={name: sums[name] for name in _STEPS if name in sums},
        gauges={name: sums[name] for name in _GAUGES if name in sums},
        requests=requests,
        asleep=_is_asleep(text),
        odd=frozenset(odd),
    )


def _is_asleep(text: str) -> bool:
    """Return whether all engines in a text of /metrics sleep."""
    awake = [value for labels, value in _SLEEP_STATE.findall(text) if _AWAKE in labels]
    return bool(awake) and set(awake) <= set(_NO)


def has_moved(figures: Mapping[str, float], former: Mapping[str, float]) -> bool:
    """Return whether a figure has changed; a new figure has not."""
    return any(former.get(name, figure) != figure for name, figure in figures.items())


def read_life(line: str) -> ServerLife | None:
    """Return the life in a line that a watch told systemd; None for any other line."""
    state, sign, text = line.partition(": ")
    if sign and state in _STATES:
        return ServerLife(state, text)
    return None
