"""Watch that a server lives, and tell systemd; write the stacks of a server that is frozen.

    alive.py alive             beside the head's server: WATCHDOG=1 whenever it proves that it lives
    alive.py working ID S      on a worker: say what shows that it works, after S seconds of silence
    alive.py stacks ID         on a worker: after the end of standard input, let the processes of
                               its rank write their stacks

A server answers /health with 200 even if its engine hangs. systemd keeps the time: if this script
does not send WATCHDOG=1 for WatchdogSec=, systemd sends it SIGABRT. Then the script says why and
ends with FROZEN, and the unit kills the server, as after a crash.

This file is copied to the nodes, beside group.py, judge.py and the modules that both import.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from patchkit.cluster.agent.group_script import (
    Settings,
    TokenAnswer,
    ask_token,
    enter_start,
    leave,
    main,
    notify,
    own_server,
    say,
    show_property,
    worker_words,
)
from patchkit.cluster.agent.judge import (
    DOUBT,
    Counters,
    ServerLife,
    ServerSigns,
    describe_trouble,
    has_moved,
    is_question_refused,
    judge,
    read_counters,
)
from patchkit.cluster.agent.processes import (
    is_in_unit,
    read_mark,
    read_processes,
    run_tool,
    strangers,
)
from patchkit.http_exchange import HttpAnswer, HttpServer

FROZEN = 3  # exit status after which the unit kills the server
_OFTEN = 30.0  # seconds between two questions for a token, if the server has clients
_SELDOM = 600.0  # and if it has none
_STEP = 600.0  # seconds that one step may take while the GPU draws power
_COMPILE = 3600.0  # seconds that a compiler may run
_TOOL = 5.0  # seconds for a program, or for a login by ssh
_GLANCE = 1.0  # seconds that one look at the server waits for a token
_STACKS = 8.0  # seconds until all stacks are written; head.service starts the head anew after 20
_LINES = 200  # the last lines of a file of stacks, which are shown
_COMPILERS = {
    "ptxas",
    "cicc",
    "nvcc",
    "nvlink",
    "fatbinary",
    "cc1plus",
    "cc1",
    "ninja",
    "ld",
}
_WORKS = "works: "  # begins the line of `working`: a login may print other lines
_ABORTED = "Fatal Python error: Aborted"  # faulthandler's first line of the stacks of a process


def alive(settings: Settings) -> None:
    """Send systemd WATCHDOG=1 whenever the server proves that it lives, until a signal comes.

    After ``frozen`` seconds (of cluster.toml) without WATCHDOG=1, systemd sends SIGABRT. Then look
    once more: exit with 0 if the server lives, else write the stacks of all ranks and exit with
    FROZEN, so that systemd starts the server again.
    """
    watch = Liveness(settings)
    patience = watch.patience

    def fire(*_signal: object) -> NoReturn:
        raise FiredError

    signal.signal(signal.SIGABRT, fire)
    notify("READY=1\nWATCHDOG=1")
    try:
        while True:
            life = watch.look()
            if life.proof:
                notify(f"WATCHDOG=1\nSTATUS={life.line}")
            elif watch.silent > patience / 2:
                doubt = f"no sign of life for {watch.silent:.0f} s: {life.text}"
                say(doubt)
                notify(f"STATUS={ServerLife(DOUBT, doubt).line}")

            time.sleep(patience / 12)
    except FiredError:
        # Maybe the server is well, and only this process had no time to run: look once more.
        life = judge(watch.look_at_server(_TOOL / 2), patience)
        if life.proof:
            leave(0, f"late, and not frozen: {life.proof}")
        say(
            f"frozen: nothing shows for {patience:.0f} s that the server lives: {life.text}"
        )
        find_stacks(settings)
        leave(FROZEN, "the server is killed, and started again")
    except KeyboardInterrupt:
        pass
    finally:
        # systemd would show the last status until the next start.
        notify("STATUS=")


def working(
    settings: Settings,
    start: str,
    silent: str,
) -> None:
    """Say the sign that this node works, if there is one.

    ``start`` is the id of the start that the head runs, ``silent`` the seconds since a proof.
    """
    enter_start(settings, start)
    if work := find_work(settings, float(silent)):
        say(f"{_WORKS}{work}")


def stacks(settings: Settings, start: str) -> None:
    """Let the processes of this node's rank write their stacks, once standard input ends."""
    enter_start(settings, start)
    sys.stdin.read()
    write_stacks(settings)


class FiredError(BaseException):
    """systemd's SIGABRT came: nothing has proved for too long that the server lives."""


class Liveness:
    """The signs of life of a server, kept from one look to the next."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.patience = float(settings["frozen"])
        self.server = own_server(settings)
        self.counters: Counters | None = None
        self.other_listeners = ""

        # Seconds on the monotonic clock.
        self.last_proof_at = time.monotonic()
        self.last_step_at = self.last_proof_at
        self.last_question_at = self.last_proof_at
        self.question: threading.Thread | None = None
        self.reply: TokenAnswer | None = None

        self.token_refusal = ""
        self.question_refusal = ""

    @property
    def silent(self) -> float:
        """Return for how many seconds the server itself gave no proof; a node's work is none."""
        return time.monotonic() - self.last_proof_at

    def look(self) -> ServerLife:
        """Return the life that the server shows.

        After a while without a proof, this node's programs and its GPU count too; after a longer
        one, those of the workers.
        """
        signs = self.look_at_server(self.patience / 6)
        life = judge(signs, self.patience)
        if life.proof:
            self.last_proof_at = time.monotonic()
        elif self.silent > self.patience / 8:
            workers: Iterable[Settings] = ()
            if self.silent > self.patience / 2:
                workers = self.settings["workers"].values()
            work = find_group_work(self.settings, workers, self.silent)
            life = judge(replace(signs, work=work), self.patience)

        return life

    def look_at_server(self, seconds: float) -> ServerSigns:
        """Return the signs of the server itself.

        /metrics is late after ``seconds``; after twice as many it is not waited for.
        """
        answer = self.server.ask("/metrics", seconds=2 * seconds)
        counters = read_counters(answer.text)
        former = self.counters or counters
        signs = read_metrics_signs(answer, former, self.settings["url"])
        # Without an answer, the next look compares with the last one that came.
        if not signs.metrics_trouble:
            self.counters = counters
        if signs.steps_moved:
            self.last_step_at = time.monotonic()

        answered = self._ask_engine(signs.has_clients)
        wait = time.monotonic() - self.last_question_at if self.question else 0.0

        return replace(
            signs,
            is_late=answer.ms > seconds * 1000,
            other_listeners=self.other_listeners,
            token_came=answered and not (self.token_refusal or self.question_refusal),
            token_wait_s=wait,
            token_refusal=self.token_refusal,
            question_refusal=self.question_refusal if answered else "",
            paused=wait > self._often and is_paused(self.server),
        )

    @property
    def _often(self) -> float:
        """Return the seconds between two questions to a server that has something to do."""
        return min(_OFTEN, self.patience / 4)

    def _ask_engine(self, has_clients: bool) -> bool:
        """Ask for a token when it is time to; return whether an answer came during this call."""
        if not self.question and self._is_question_due(has_clients):
            self._begin_question()
        if not self.question:
            return False

        self.question.join(_GLANCE)
        # Do not ask the thread whether it has ended: Python up to 3.12 says yes too early if a
        # signal's handler raises during `join`.
        if self.reply is None:
            return False
        self.question = None

        self.token_refusal = ""
        self.question_refusal = ""
        if is_question_refused(self.reply.status):
            self.question_refusal = self.reply.refusal
        else:
            self.token_refusal = self.reply.refusal
        if not self.token_refusal:
            self.last_step_at = time.monotonic()
        return True

    def _is_question_due(self, has_clients: bool) -> bool:
        """Return whether the last question or step was long enough ago for a new question."""
        pause = _SELDOM
        if has_clients or self.token_refusal or self.other_listeners:
            pause = self._often
        last_sign_at = max(self.last_step_at, self.last_question_at)
        return time.monotonic() - last_sign_at >= pause

    def _begin_question(self) -> None:
        """Ask for a token in a thread, unless another program listens at the server's port."""
        self.last_question_at = time.monotonic()
        # The question carries the key, which only the group's own server may get.
        listeners = strangers(
            self.settings["url"],
            self.settings["unit"],
            self.settings["name"],
        )
        self.other_listeners = "; ".join(listeners)
        if not self.other_listeners:
            self.reply = None
            self.question = threading.Thread(target=self._ask_token, daemon=True)
            self.question.start()

    def _ask_token(self) -> None:
        listing = self.server.ask("/v1/models")
        self.reply = ask_token(self.server, listing)


def read_metrics_signs(
    answer: HttpAnswer,
    former: Counters,
    url: str,
) -> ServerSigns:
    """Return the signs in an answer of /metrics, and what moved since the ``former`` counters.

    The watch and `status` begin with these signs; those of a question for a token come later.
    """
    counters = read_counters(answer.text)
    trouble = describe_trouble("/metrics", answer.status, answer.trouble)
    # Without a usable number of requests take it that there are some.
    is_uncounted = bool(trouble) or (bool(counters) and counters.requests is None)

    return ServerSigns(
        refused=answer.closed,
        has_counters=bool(counters),
        metrics_trouble=trouble,
        steps_moved=has_moved(counters.steps, former.steps),
        gauges_moved=has_moved(counters.gauges, former.gauges),
        asleep=counters.asleep,
        has_clients=is_uncounted or bool(counters.requests) or has_clients(url),
        requests=counters.requests,
    )


def is_paused(server: HttpServer) -> bool:
    """Return whether a server says that it is paused.

    Only a server with VLLM_SERVER_DEV_MODE can be paused, and has /is_paused.
    """
    return server.ask("/is_paused", seconds=_TOOL).value("is_paused") is True


def has_clients(url: str) -> bool:
    """Return whether a client has a connection to the server."""
    port = urllib.parse.urlsplit(url).port or 80
    sockets = _try_tool("ss", "-Htn", "state", "established", f"( sport = :{port} )")
    return bool(sockets.strip())


def find_group_work(
    settings: Settings,
    workers: Iterable[Settings],
    silent: float,
) -> str:
    """Return the sign that this node or one of ``workers`` works, "" for none.

    ``silent`` are the seconds since the server proved that it lives.
    """
    if work := find_work(settings, silent):
        return work

    for worker in workers:
        words = worker_words(worker, settings, "alive.py working", silent)
        if line := re.search(f"{_WORKS}(.+)", _try_tool(*words)):
            return f"{worker['node']}: {line[1]}"
    return ""


def find_work(settings: Settings, silent: float) -> str:
    """Return the sign that this node works though the server's counters stand still, "" for none.

    It is a compiler of the group or, for a shorter time, the power that the GPU draws.
    """
    if silent < _COMPILE and (compiler := _find_compiler(settings["name"])):
        return f"{compiler} compiles"

    if settings["watts"] and silent < _STEP:
        query = ("--query-gpu=power.draw", "--format=csv,noheader,nounits")
        rows = _try_tool("nvidia-smi", *query)
        figures = re.findall(r"(?m)^\d+\.?\d*", rows)
        watts = max(map(float, figures), default=0.0)  # of the GPU that draws most
        if watts > settings["watts"]:
            return f"the GPU draws {watts:.0f} W"
    return ""


def _find_compiler(cluster: str) -> str:
    """Return the name of a compiler that the group of ``cluster`` runs here, "" for none."""
    compilers = (row for row in read_processes() if row.name in _COMPILERS)
    return next((row.name for row in compilers if read_mark(row.pid) == cluster), "")


def find_stacks(settings: Settings) -> None:
    """Let the processes of all ranks write their stacks, all at once.

    They end with it, and the first rank that ends stops the others.
    """
    reading, writing = os.pipe()  # all workers see its end at once
    links = []
    for worker in settings["workers"].values():
        words = worker_words(worker, settings, "alive.py stacks")
        links.append(subprocess.Popen(words, stdin=reading))
    if links:
        time.sleep(_TOOL)  # for the logins

    os.close(writing)
    write_stacks(settings)
    for link in links:
        with suppress(subprocess.TimeoutExpired):
            link.wait(_TOOL)


def write_stacks(settings: Settings) -> None:
    """Let the processes of this node's rank write their stacks, by SIGABRT; they end with it.

    The main process gets it last: when that ends, systemd ends the others.
    """
    unit = settings["unit"]
    began = time.time()
    count = 0
    trouble = ""

    for is_main in (False, True):
        trouble = _abort_processes(settings, is_main) or trouble
        count = _count_stacks(unit, began, count)

    outcome = f"stacks of {count} processes are in the journal of {unit}"
    if not count:
        outcome = f"no stacks came; {trouble}".strip("; ")
    say(f"{socket.gethostname()}: {outcome}")

    # vLLM's own watchdog writes these when it finds a process hanging.
    for file in Path(settings["stacks"]).glob("VLLM_STACK_DUMP_for_*"):
        with suppress(OSError):  # it is gone, or belongs to another user
            lines = file.read_text(errors="replace").splitlines()
            if file.stat().st_mtime > began - _STEP:
                say("\n".join(f"{file.name}: {line}" for line in lines[-_LINES:]))


def _abort_processes(settings: Settings, is_main: bool) -> str:
    """Send SIGABRT to the main process of a rank or, without ``is_main``, to all its others.

    SIGCONT follows, since a stopped process would not end. Returns what went wrong, "" for nothing.
    """
    # The words that run a program in the rank's container.
    if inside := settings.get("inside"):
        return _abort_in_container(inside, is_main)

    unit = settings["unit"]
    main_pid = show_property(unit, "MainPID")
    for process in read_processes():
        is_asked = (str(process.pid) == main_pid) == is_main
        if is_asked and is_in_unit(process.pid, unit):
            with suppress(OSError):
                os.kill(process.pid, signal.SIGABRT)
                os.kill(process.pid, signal.SIGCONT)
    return ""


def _abort_in_container(inside: Iterable[str], is_main: bool) -> str:
    """Do as ``_abort_processes`` in a container, whose main process is its process 1."""
    pids = 1 if is_main else -1  # -1 are all but process 1 of the container
    script = f"kill -ABRT {pids}; kill -CONT {pids}"

    try:
        trouble = run_tool(*inside, "sh", "-c", script, seconds=_TOOL).stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        trouble = str(error)
    return " ".join(trouble.split())[-300:]


def _count_stacks(
    unit: str,
    since: float,
    former: int,
) -> int:
    """Wait until more than ``former`` stacks are in the journal and none is added, or some seconds.

    Returns how many there are of the unit's processes since the time ``since``.
    """
    words = ("journalctl", "--quiet", "--output=cat", f"--since=@{since:.6f}")
    deadline = time.monotonic() + _STACKS / 2
    count = former

    while time.monotonic() < deadline:
        time.sleep(0.5)
        former_count = count
        count = _try_tool(*words, f"_SYSTEMD_USER_UNIT={unit}").count(_ABORTED)
        if count == former_count and count > former:
            break
    return count


def _try_tool(*words: str) -> str:
    """Return what a program writes, "" if the program is missing or takes too long."""
    with suppress(OSError, subprocess.TimeoutExpired):
        return run_tool(*words, seconds=_TOOL).stdout
    return ""


if __name__ == "__main__":
    main(alive, working, stacks)
