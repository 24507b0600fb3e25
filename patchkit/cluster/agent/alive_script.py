"""Watch that a server lives, and say so to systemd; find out where a frozen one is.

    alive.py alive             beside the head's server: WATCHDOG=1 as often as it proves to live
    alive.py working ID S      on a worker: what shows that it works, after S seconds of silence
    alive.py stacks ID         on a worker: let the processes of its rank write where they are, at a
                               line of standard input

/health says 200 of an engine that hangs. systemd keeps the time: where nothing proves for
WatchdogSec= that the server lives, it sends SIGABRT; then this says why, and what the unit does
after that kills the server, as after a crash.

This file is copied to the nodes, beside group.py.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
from collections import Counter
from pathlib import Path
from typing import NoReturn

from patchkit.cluster.agent import group_script as group

FROZEN = 3  # exit status after which the unit kills the server
_OFTEN, _SELDOM = 30.0, 600.0  # seconds between two tokens: with clients, and without any
_STEP = 600.0  # seconds that one step may take while the GPU draws power
_COMPILE = 3600.0
_TOOL = 5.0  # seconds for a program, or a login
_STACKS = 8.0  # seconds for the stacks; the head is started anew after 20, of head.service
_LINES = 200  # of a file of stacks
# What nothing but an engine's outputs changes: `record` in vLLM's v1/metrics/loggers.py, 0.11.0 to
# 0.33.0. A chunk of a prefill has no output and counts no iteration, but the cache fills.
_COUNTS = re.compile(
    r"^vllm:(iteration_tokens_total_count|generation_tokens_total|prompt_tokens_total"
    r"|prefix_cache_queries_total|kv_cache_usage_perc|num_requests_\w+)(?:\{.*\})? (\S+)$",
    re.MULTILINE,
)
_ASLEEP = re.compile(r'^vllm:engine_sleep_state\{.*sleep_state="awake".*\} 0(\.0)?$', re.MULTILINE)
_COMPILERS = {"ptxas", "cicc", "nvcc", "nvlink", "fatbinary", "cc1plus", "cc1", "ninja", "ld"}
_SCRIPT = "-sEB alive.py"  # which finds group.py beside it
_WORKS = "works: "  # a login may print lines of its own
_ABORTED = "Fatal Python error: Aborted"  # of faulthandler
_SILENT = (OSError, ValueError, LookupError, TypeError, http.client.HTTPException)


def alive(settings: group.Settings) -> None:
    """Say WATCHDOG=1 as often as the server proves that it lives."""
    liveness, patience, proofs = Liveness(settings), float(settings["frozen"]), Counter[str]()

    def fire(*_signal: object) -> NoReturn:
        raise FiredError

    signal.signal(signal.SIGABRT, fire)
    group.notify("READY=1\nWATCHDOG=1")
    try:
        while True:
            proof = liveness.find_proof()
            silent = time.monotonic() - liveness.proved
            text = ""
            if proof:
                proofs[re.sub(r"\d+", "N", proof)] += 1
            elif silent > patience / 2:
                text = f"no sign of life for {silent:.0f} s: {liveness.doubt}"
                group.say(text)
            group.notify(f"{'WATCHDOG=1' if proof else ''}\nSTATUS={text}")
            time.sleep(patience / 12)
    except FiredError:
        # This process may have been the one that did not come to run.
        if proof := liveness.look_at_server(_TOOL):
            group.leave(0, f"late, and not frozen: {proof}")
        group.say(
            f"frozen: nothing shows for {patience:.0f} s that the server lives: {liveness.doubt}"
        )
        find_stacks(settings)
        group.leave(FROZEN, "the server is killed, and started again")
    except KeyboardInterrupt:
        pass
    finally:
        said = ", ".join(f"{proof}: {count}" for proof, count in proofs.most_common())
        group.say(f"proofs: {said or 'none'}")
        group.notify("STATUS=")  # which systemd keeps until the next start


def working(settings: group.Settings, start: str, silent: str) -> None:
    """Say what shows that this node works."""
    group.enter_start(settings, start)
    if found := find_work(settings, float(silent)):
        group.say(f"{_WORKS}{found}")


def stacks(settings: group.Settings, start: str) -> None:
    """Let the processes of this node's rank write where they are, once a line comes."""
    group.enter_start(settings, start)
    sys.stdin.readline()
    write_stacks(settings)


class FiredError(BaseException):
    """Nothing proved for too long that the server lives."""


class Liveness:
    """What is known of a server; ``doubt`` says what was last missed of it."""

    def __init__(self, settings: group.Settings) -> None:
        self.settings = settings
        self.patience = float(settings["frozen"])
        self.counts: dict[str, float] = {}
        self.doubt = ""
        # On the monotonic clock: what it proved, what its engine did, when a token was asked for.
        self.proved = self.moved = self.asked = time.monotonic()
        self.question: threading.Thread | None = None
        self.failed: BaseException | None = None

    def find_proof(self) -> str:
        """Return what proves that the server lives, "" for nothing."""
        proof = self.look_at_server(self.patience / 6)
        silent = time.monotonic() - self.proved
        if proof:
            self.proved = time.monotonic()
        elif silent > self.patience / 8:
            proof = find_work(self.settings, silent)
            workers = self.settings["workers"].values() if silent > self.patience / 2 else ()
            for worker in workers:
                words = group.worker_words(worker, self.settings, f"{_SCRIPT} working", silent)
                if found := re.search(f"{_WORKS}(.+)", _try_tool(*words)):
                    proof = f"{worker['node']}: {found[1]}"
        return proof

    def look_at_server(self, seconds: float) -> str:
        """Return what the server itself proves, "" for nothing."""
        now = time.monotonic()
        try:
            text = group.fetch(self.settings, "/metrics", seconds=seconds).decode(errors="replace")
        except (urllib.error.HTTPError, http.client.HTTPException):
            text = ""  # a server that has no such page, or fails to write it
        except _SILENT as error:
            self.doubt = f"/metrics does not answer: {error}"
            return ""
        former, self.counts = self.counts, read_counts(text)
        if not self.counts:
            return "it has no counters, and answers"
        if self.counts != former:
            self.moved = now
            return "its counters move"
        if _ASLEEP.search(text):
            return "it sleeps"
        return self._ask_engine(now)

    def _ask_engine(self, now: float) -> str:
        """Ask for a token where one is due; return what is known of an engine that counts nothing.

        That no token comes proves nothing: it may wait behind others.
        """
        counted = (self.counts.get(f"num_requests_{it}", 0) for it in ("running", "waiting"))
        requests = round(sum(counted))
        busy = bool(requests) or has_clients(self.settings["url"])
        if self.question and not self.question.is_alive():
            self.question = None
            if self.failed is None:
                self.moved = now
                return "a token came"
        often = min(_OFTEN, self.patience / 4)
        pause = often if busy or self.failed else _SELDOM
        if not self.question and now - max(self.moved, self.asked) >= pause:
            self.asked = now
            self.question = threading.Thread(target=self._ask_token, daemon=True)
            self.question.start()
        if not busy and not self.question and not self.failed:
            return "it has nothing to do"
        if self.question and now - self.asked > often:
            with contextlib.suppress(*_SILENT):  # a route of VLLM_SERVER_DEV_MODE, as pausing is
                if group.ask(self.settings, "/is_paused", seconds=_TOOL)["is_paused"]:
                    return "it is paused"
        self.doubt = f"{requests} requests, and no step"
        if self.question:
            self.doubt += f"; a token that was asked for {now - self.asked:.0f} s ago does not come"
        return ""

    def _ask_token(self) -> None:
        self.failed = None
        try:
            group.ask_token(self.settings)
        except _SILENT as error:
            # Refused as a question, it says nothing of the engine, but nothing better is to be had.
            if getattr(error, "code", 500) >= 500:
                self.failed = error


def read_counts(text: str) -> dict[str, float]:
    """Return what engines count, each name's sum over all of them."""
    counts: dict[str, float] = {}
    for name, value in _COUNTS.findall(text):
        with contextlib.suppress(ValueError):
            counts[name] = counts.get(name, 0.0) + float(value)
    return counts


def has_clients(url: str) -> bool:
    """Return whether anybody is connected to the server."""
    port = urllib.parse.urlsplit(url).port or 80
    return bool(_try_tool("ss", "-Htn", "state", "established", f"( sport = :{port} )").strip())


def find_work(settings: group.Settings, silent: float) -> str:
    """Return what shows that this node works though nothing is counted, "" for nothing."""
    for folder in Path("/proc").glob("[0-9]*") if silent < _COMPILE else ():
        with contextlib.suppress(OSError):  # it ended, or is not ours
            name = (folder / "comm").read_text(errors="replace").strip()
            if name in _COMPILERS and group.has_mark(folder, settings["name"]):
                return f"{name} compiles"
    if settings["watts"] and silent < _STEP:
        words = ("nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits")
        drawn = re.findall(r"^\d+\.?\d*", _try_tool(*words), re.MULTILINE)
        if (watts := max(map(float, drawn), default=0.0)) > settings["watts"]:
            return f"the GPU draws {watts:.0f} W"
    return ""


def find_stacks(settings: group.Settings) -> None:
    """Let all ranks write where they are, at once: the first one to end takes the others along."""
    workers, script = settings["workers"].values(), f"{_SCRIPT} stacks"
    asked = [group.worker_words(worker, settings, script) for worker in workers]
    links = [subprocess.Popen(words, stdin=subprocess.PIPE) for words in asked]
    time.sleep(_TOOL if links else 0)  # for the logins
    for link in links:
        assert link.stdin
        with contextlib.suppress(BrokenPipeError):
            link.stdin.write(b"\n")
            link.stdin.flush()
    write_stacks(settings)
    for link in links:
        with contextlib.suppress(subprocess.TimeoutExpired):
            link.wait(_TOOL)


def write_stacks(settings: group.Settings) -> None:
    """Let the processes of a rank write where they are, by SIGABRT: they end with it.

    The main process is the last one: systemd ends the others with it.
    """
    unit, began, count, why = settings["unit"], time.time(), 0, ""
    for main in (False, True):
        why = _abort_processes(settings, main) or why
        count = _count_stacks(unit, began, count)
    found = f"stacks of {count} processes are in the journal of {unit}"
    group.say(f"{socket.gethostname()}: {found if count else f'no stacks came; {why}'.strip('; ')}")
    # Those that vLLM's own watchdog wrote when it found a process hanging.
    for file in Path(settings["stacks"]).glob("VLLM_STACK_DUMP_for_*"):
        if file.stat().st_mtime > began - _STEP:
            for line in file.read_text(errors="replace").splitlines()[-_LINES:]:
                group.say(f"{file.name}: {line}")


def _abort_processes(settings: group.Settings, main: bool) -> str:
    """Send SIGABRT, and let go on what was stopped, so that it ends; return what went wrong."""
    if inside := settings.get("inside"):  # the words before a command in its container
        which = 1 if main else -1  # -1: all but the first one
        words = (*inside, "sh", "-c", f"kill -ABRT {which}; kill -CONT {which}")
        try:
            said = group.run_tool(*words, seconds=_TOOL).stderr
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
        return " ".join(said.split())[-300:]
    first = group.show_property(settings["unit"], "MainPID")
    unit = re.compile(f"/{re.escape(settings['unit'])}(/|$)", re.MULTILINE)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if unit.search((folder / "cgroup").read_text()) and (folder.name == first) == main:
                os.kill(int(folder.name), signal.SIGABRT)
                os.kill(int(folder.name), signal.SIGCONT)
    return ""


def _count_stacks(unit: str, since: float, former: int = 0) -> int:
    """Wait until more processes have written, and then no more do; return how many have."""
    asked = ("journalctl", "--quiet", "--output=cat", f"--since=@{since:.6f}")
    count, last, deadline = former, -1, time.monotonic() + _STACKS / 2
    while time.monotonic() < deadline and not former < count == last:
        time.sleep(0.5)
        text = _try_tool(*asked, f"_SYSTEMD_USER_UNIT={unit}")
        last, count = count, text.count(_ABORTED)
    return count


def _try_tool(*words: str) -> str:
    """Return what a program says, "" for one that is not there or takes too long."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return group.run_tool(*words, seconds=_TOOL).stdout
    return ""


if __name__ == "__main__":
    group.main(alive, working, stacks)
