"""Freeze what serves, and let it only seem frozen: the one is restarted, the other never."""

from __future__ import annotations

import json
import time

from e2e.lifecycle import fake_venv
from e2e.lifecycle.cluster import (
    MODEL,
    QUESTION,
    URL,
    EmulatedCluster,
    Ranks,
    insist,
    scenario,
    wait,
)
from patchkit.errors import HostError

ALIVE = "patchkit-vllm-alive.service"
REFUSED = HostError.exit_code
SOON = 30  # seconds that are given instead of 120
LONG = SOON + 12
WATTS = "#!/bin/sh\necho {}\n"  # nvidia-smi, asked for the power
STEP = 100  # seconds, longer than `status` and the start of `up` take
SLEEPS = "import socket, time; s = socket.create_connection(('127.0.0.1', 8000)); time.sleep({})"
COMPILES = "cp /bin/sleep /tmp/ptxas; PATCHKIT_CLUSTER=vllm exec /tmp/ptxas {}"


@scenario("serving", engines=("docker", "podman"))
def engine_frozen(cluster: EmulatedCluster) -> str:
    """SIGSTOP of the head's worker process while somebody asks; `/health` says 200 all the time."""
    before = cluster.ranks()
    cluster.kill("spark1", "worker", "STOP")
    ask(cluster)
    health = ("curl", "--silent", "--fail", "--max-time", "2", f"{URL}/health")
    insist(
        not cluster.head.user(*health).trouble, "/health says that something is wrong"
    )
    return is_cured(cluster, before, "spark1", "since one was asked for")


@scenario("serving")
def others_frozen(cluster: EmulatedCluster) -> str:
    """SIGSTOP of the API server; then of the other rank's worker process while somebody asks."""
    before = cluster.ranks()
    cluster.kill("spark1", "main", "STOP")
    told = is_cured(cluster, before, "spark1", "/metrics does not answer")
    before = cluster.ranks()
    cluster.kill("spark2", "worker", "STOP")
    ask(cluster)
    return f"{told}; {is_cured(cluster, before, 'spark2', 'since one was asked for')}"


@scenario("stopped")
def not_frozen(cluster: EmulatedCluster) -> str:
    """With `frozen = 30`, for longer: a prefill, a slow step, a compiler, silence, and more."""
    cluster.describe(frozen=SOON)
    cluster.up()
    before, head = cluster.ranks(), cluster.head

    show = ("systemctl", "--user", "show", "--property=StatusText", ALIVE)
    statuses = set()

    def lives(what: str, seconds: float = LONG) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            statuses.add(head.user(*show).output)
            time.sleep(1)
        insist(
            cluster.ranks() == before, f"{what}: it was restarted: {said_by(cluster)}"
        )
        wait(cluster.answers, LONG, f"{what}: it does not answer")

    ask(cluster, steps=LONG, seconds=1, prefill=True)
    lives("a prefill by chunks")
    _set_watts(cluster, 44)
    ask(cluster, seconds=LONG)
    lives("a long step")
    _set_watts(cluster, 20)
    ask(cluster, seconds=LONG)
    cluster.worker.user("systemd-run", "--user", "sh", "-c", COMPILES.format(LONG))
    lives("a compiler on the worker")
    _start(cluster, "python3", "-c", SLEEPS.format(LONG))
    lives("a client that says nothing")
    cluster.kill("spark1", "main", "STOP")
    time.sleep(SOON / 2)
    cluster.kill("spark1", "main", "CONT")
    lives("/metrics missed", SOON / 2)
    cluster.change(STATS=0)
    ask(cluster, seconds=LONG)
    lives("no counters")
    said = "".join(sorted(statuses))
    words = (
        "its gauges move",
        "a token came",
        "the GPU draws",
        "ptxas compiles",
        "no counters",
    )
    insist(all(each in said for each in words), f"another proof was expected: {said}")
    head.user("systemctl", "--user", "kill", "--signal=KILL", ALIVE)
    lives("what watches was killed", SOON / 2)
    return "served by the same processes all the time; what watches is started again"


@scenario("stopped")
def slow_metrics(cluster: EmulatedCluster) -> str:
    """With `frozen = 30`: `/metrics` takes 12 s, and tokens come all the time."""
    cluster.describe(frozen=SOON)
    cluster.change(METRICS=12)
    cluster.up()
    before, count = cluster.ranks(), 0
    deadline = time.monotonic() + 2 * LONG
    while time.monotonic() < deadline:
        count += cluster.answers()
        insist(cluster.ranks() == before, f"it was restarted: {said_by(cluster)}")
        time.sleep(1)
    insist(count > SOON, f"{count} answers")
    cluster.expect("status", says="watch spark1: a token came")
    return "served by the same processes; `status` says by what it lives"


@scenario("serving")
def engine_stalled(cluster: EmulatedCluster) -> str:
    """No request is scheduled any more, while clients come, and the waiting ones are counted."""
    before = cluster.ranks()
    cluster.change(STALL=1)
    asks = f"while sleep 8; do curl --silent -m 600 {URL}/v1/completions --json '{QUESTION}' & done"
    _start(cluster, "sh", "-c", asks)
    hangs = (
        "hangs spark1",
        "requests, and no step; no token in the 30 s since one was asked for",
    )
    cluster.expect("status", status=REFUSED, says=hangs)
    heals = ("the model hangs", "after 120 s without a sign of life", "patchkit status")
    cluster.expect("up", MODEL, status=REFUSED, says=heals)
    wait(lambda: "frozen: " in said_by(cluster), 180, "it is not found frozen")
    cluster.change()
    healed = is_cured(cluster, before, "spark1", "requests, and no step")
    return f"`status` and `up` say that it hangs, and when it is restarted; {healed}"


@scenario("serving")
def unwatched(cluster: EmulatedCluster) -> str:
    """What watches is stopped by hand; then a step takes long while a compiler runs."""
    before, head = cluster.ranks(), cluster.head
    head.user("systemctl", "--user", "stop", ALIVE)
    cluster.expect(
        "status", status=REFUSED, says=f"not watched spark1: {ALIVE} is inactive"
    )
    cluster.expect(
        "up", MODEL, says=(f"{ALIVE} was inactive", "runs with these files already")
    )
    cluster.expect("status", says="watch spark1: ")
    ask(cluster, seconds=STEP)
    cluster.worker.user("systemd-run", "--user", "sh", "-c", COMPILES.format(STEP))
    said = cluster.expect(
        "status", status=REFUSED, says="works spark1: spark2: ptxas compiles"
    )
    insist("hangs" not in said, said)
    cluster.expect(
        "up", MODEL, says=("gives no token yet: spark2: ptxas compiles", "answers")
    )
    insist(cluster.ranks() == before, f"it was restarted: {said_by(cluster)}")
    return "`status` says so, and `up` starts it again; `up` waits for a step that compiles"


def is_cured(cluster: EmulatedCluster, before: Ranks, name: str, why: str) -> str:
    """Insist that it serves again, that `status` says why, and the stacks are in a journal."""
    healed = cluster.heals(before)
    frozen = cluster.head_status()["frozen"]
    insist(
        "frozen: " in frozen and why in frozen,
        f"status says {frozen!r}: {said_by(cluster)}",
    )
    cluster.expect("status", says=("restarted", why))
    asked = ("journalctl", "--user", "--quiet", "--output=cat", "--since=-3min")
    text = cluster.nodes[name].user(*asked).output
    insist(
        "Fatal Python error: Aborted" in text and "(most recent call first)" in text,
        text,
    )
    return healed


def said_by(cluster: EmulatedCluster, unit: str = ALIVE) -> str:
    """Return what a unit of the head's wrote."""
    asked = ("journalctl", "--user", "--quiet", "--output=cat", "--unit", unit)
    return cluster.head.user(*asked).output


def ask(cluster: EmulatedCluster, **fake: object) -> None:
    """Ask on the head, and do not wait for the answer."""
    body = json.dumps(
        {"prompt": "a", "max_tokens": 4, **({"fake": fake} if fake else {})}
    )
    _start(cluster, "curl", "--silent", f"{URL}/v1/completions", "--json", body)


def _start(cluster: EmulatedCluster, *words: str) -> None:
    """Start a command on the head, and do not wait for it."""
    fake_venv.insist_user(
        cluster.head, "systemd-run", "--user", "--quiet", "--collect", *words
    )


def _set_watts(cluster: EmulatedCluster, watts: int) -> None:
    path = "/usr/local/bin/nvidia-smi"
    script = f"cat > {path} && chmod +x {path}"
    cluster.head.root("sh", "-c", script, input=WATTS.format(watts).encode())
