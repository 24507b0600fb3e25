"""Judge whether a server lives, by its signs of life. Pure.

The watch on the head, `status` and `up` use the one table in ``judge``: the first row that holds
decides. The first row is for another program that listens at the server's port, the second for a
token that came: it proves that the engine works, whatever else is silent. Gauges that move prove
less than counters: they count only until a token has been missing for too long. This file is copied
to the nodes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
_MOST = 1e9  # requests that are shown at most
_SERVER_ERRORS = 500  # statuses of HTTP from here on mean trouble in the server itself
_NO_SUCH_QUESTION = 501  # except this one: the model does not serve the path
# Times `frozen`: for so long a prefill in chunks, or a machine that is slow, may delay a token.
_PATIENCE = 4.0

# Written by `record` in vLLM's v1/metrics/loggers.py, 0.11.0 to 0.33.0. A step adds the tokens
# that it gave to the counters. A chunk of a prefill gives no token and adds nothing, but the gauge
# of the cache moves. The number of waiting requests is no sign of life: it changes with each new
# client, and while a scheduler asks the prefix cache in vain.
_STEPS = (
    "iteration_tokens_total_count",
    "generation_tokens_total",
    "prompt_tokens_total",
)
_RUNNING = "num_requests_running"
_GAUGES = ("kv_cache_usage_perc", _RUNNING)
_WAITING = "num_requests_waiting"
# Only one part of the pattern has no fixed length: with two, a hostile line would take hours.
_SERIES = re.compile(
    r"^([A-Za-z_:][\w:]*)(?:\{(.{,65536})\})? (\S{1,40})(?: \d{1,20})?$", re.MULTILINE
)
_AWAKE = 'sleep_state="awake"'
_NO = {"0", "0.0"}


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The counters in a text of /metrics: for each name the sum over all engines.

    ``odd`` are names without a sum, since the value of an engine is negative or not a finite
    number. ``requests`` run or wait, None if their number is not known. ``asleep`` says that all
    engines sleep.
    """

    steps: Mapping[str, float]
    gauges: Mapping[str, float]
    requests: int | None
    asleep: bool
    odd: frozenset[str]

    def __bool__(self) -> bool:
        """Return whether the text has a counter or gauge."""
        return bool(self.steps or self.gauges or self.odd)


@dataclass(frozen=True, kw_only=True)
class ServerSigns:
    """The signs of a server at one moment; a sign that nobody looked for has its default.

    ``other_listeners`` are other programs at the server's port; ``refused`` says that no program
    listens there. ``token_wait_s`` are the seconds since a question for a token that is still open,
    ``token_refusal`` says why the engine gave no token. ``question_refusal`` says why the server
    refused the question itself: that says nothing of the engine. ``metrics_trouble`` says why
    /metrics has no answer, ``is_late`` that its answer took long, ``has_counters`` that it has
    counters; steps and gauges moved since the last look. ``has_clients``: somebody uses the server.
    ``work`` is a sign outside the server that a node works, such as a compiler.
    """

    other_listeners: str = ""
    refused: bool = False
    token_came: bool = False
    token_wait_s: float = 0.0
    token_refusal: str = ""
    question_refusal: str = ""
    has_counters: bool = True
    metrics_trouble: str = ""
    is_late: bool = False
    steps_moved: bool = False
    gauges_moved: bool = False
    asleep: bool = False
    paused: bool = False
    has_clients: bool = True
    requests: int | None = None
    work: str = ""

    @property
    def asked_in_vain(self) -> bool:
        """Return whether the last question for a token is open, or was answered without one."""
        return bool(self.token_wait_s or self.token_refusal)


@dataclass(frozen=True)
class ServerLife:
    """The state of a server, one of ``_STATES``, and the sign of it in words.

    ``answers``: a token came; ``lives``: the server shows life in another way; ``works``: a program
    or the GPU on a node works; ``blind``: another program may answer instead of the server;
    ``refuses``: the server does not take the question; ``ended``: no program listens; ``doubt``:
    nothing shows that the server lives.
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
        """Return state and text as one line, which the watch gives systemd as its status."""
        return f"{self.state}: {' '.join(self.text.split())}"


def judge(signs: ServerSigns, frozen: float) -> ServerLife:
    """Return the life that the signs show; ``frozen`` are the seconds from cluster.toml."""
    metrics_answer = not signs.metrics_trouble
    is_patient = signs.token_wait_s < _PATIENCE * frozen

    # Without counters, or while all is slow, a step does not show: the same patience.
    may_step = metrics_answer and not signs.token_refusal and is_patient
    is_idle = metrics_answer and not signs.has_clients and not signs.asked_in_vain

    strangers = f"not only the model listens: {signs.other_listeners}"
    refusal = f"it refuses the question: {signs.question_refusal}"

    rows = (
        (signs.other_listeners, BLIND, strangers),
        (signs.token_came, ANSWERS, "a token came"),
        (signs.refused, ENDED, "nobody listens: the connection is refused"),
        (signs.question_refusal, REFUSES, refusal),
        (signs.steps_moved, LIVES, "its counters move"),
        (signs.gauges_moved and is_patient, LIVES, "its gauges move"),
        (metrics_answer and signs.asleep, LIVES, SLEEPS),
        (signs.paused, LIVES, PAUSED),
        (
            may_step and not signs.has_counters,
            LIVES,
            "it answers /metrics, which has no counters",
        ),
        (may_step and signs.is_late, LIVES, "it answers /metrics, late"),
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
    """Return why the answer of a path says nothing of the server, "" if it does.

    ``trouble`` says why no answer came, ``status`` is the answer's.
    """
    if trouble:
        return f"{path} does not answer: {trouble}"
    if status >= _SERVER_ERRORS:
        return f"{path} says {status}"
    return ""


def is_question_refused(status: int) -> bool:
    """Return whether a status refuses the question itself: that says nothing of the engine."""
    if status == _NO_SUCH_QUESTION:
        return True
    return status not in (0, 200) and status < _SERVER_ERRORS


def read_series(text: str) -> Mapping[str, Sequence[tuple[str, str]]]:
    """Return the labels and the value of each series in a text of /metrics, by name.

    Overlong lines are left out.
    """
    series: dict[str, list[tuple[str, str]]] = {}
    for name, labels, value in _SERIES.findall(text):
        series.setdefault(name, []).append((labels, value))
    return series


def read_counters(text: str) -> Counters:
    """Return the counters in a text of /metrics; a name with an odd value has no sum."""
    series = read_series(text)
    sums = {}
    odd = set()
    for name in (*_STEPS, *_GAUGES, _WAITING):
        if rows := series.get(f"vllm:{name}"):
            try:
                sums[name] = sum(read_count(value) for _labels, value in rows)
            except ValueError:
                odd.add(name)

    sleep_states = series.get("vllm:engine_sleep_state", ())
    awake = {value for labels, value in sleep_states if _AWAKE in labels}

    requests = None
    if _RUNNING in sums and _WAITING not in odd:
        count = sums[_RUNNING] + sums.get(_WAITING, 0.0)
        requests = round(min(count, _MOST))

    return Counters(
        steps={name: sums[name] for name in _STEPS if name in sums},
        gauges={name: sums[name] for name in _GAUGES if name in sums},
        requests=requests,
        asleep=bool(awake) and awake <= _NO,
        odd=frozenset(odd),
    )


def has_moved(figures: Mapping[str, float], former: Mapping[str, float]) -> bool:
    """Return whether a figure differs from the former one of its name; a new name does not."""
    return any(former.get(name, figure) != figure for name, figure in figures.items())


def read_life(line: str) -> ServerLife | None:
    """Return the life in the status line of a watch; None for a line of another form."""
    state, sign, text = line.partition(": ")
    if sign and state in _STATES:
        return ServerLife(state, text)
    return None
