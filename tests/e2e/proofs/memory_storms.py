"""Storms: memory runs out on a node with a kernel of its own, and does it still answer?

    nox -s memory-storms -- [--half with|without] [--calm SECONDS] [--rows FILE] [STORM ...]

A machine of its own kernel (virtual_machine.py) is a cluster of one node, which patchkit on this
machine starts and asks through ssh, as an ordinary user; its rank is the stand-in for vLLM of the
lifecycle tests, and holds memory as a GPU's of a GB10. All storms rage with the guard, then on
another machine with ``memory_floor = 0``. Each begins after a boot from the same disk, when the
model answers: something takes memory (hog.py) until there is none. Every few seconds somebody logs
in and runs `true`; the slowest login counts, and may take 5 s. Then the model answers again, or
`status` says why it does not. Nothing of that has to hold without the guard.

Run it on a machine that does nothing else: the CPU of the machine with the storm is slow.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from os import environ
from pathlib import Path
from typing import Literal

from e2e.emulation.lab import insist
from e2e.emulation.nodes import NodeError
from e2e.lifecycle import fake_venv
from e2e.lifecycle.cluster import UNIT, URL
from e2e.proofs import virtual_machine
from e2e.proofs.virtual_machine import ADDRESS, HOME, STRANGER, Base, Machine
from patchkit.follow import Completed
from patchkit.process import attempt
from tools.markdown import table

ROOT = Path(__file__).parents[3]
NODE = "sparkvm"
MODEL = f"{HOME}/models/tiny"
PROGRAM = Path(__file__).with_name("hog.py")
HOG = "/usr/local/bin/hog.py"
# MiB of the machine and its swap, what a system of about 200 leaves to a rank, and a floor in GiB.
MEMORY, SWAP = 1280, 512
WEIGHTS, CACHE, LOAD_SECONDS = 200, 300, 3
FLOORS = {"with": 0.2, "without": 0.0}  # GiB; 0: no guard
DEVICE = "rtx50"  # no model of a GB10 fits a machine this small: `up` would refuse it
ALL = 4000  # more than there is with swap
# More than the rank leaves, and less than there is without it, by whether there is swap.
SOME = {False: 700, True: 1040}
PACES = {"slow": 30, "fast": 100, "burst": 0}  # MiB a second; 0: as fast as it goes
STRANGER_SECONDS = 20
HOUR = 3600
LOGIN_SECONDS = 5.0  # within which a login has to answer
LOGIN_PAUSE = 2.0  # seconds between two: logins alone may not be the load
GONE = 15  # seconds after which a login is given up
CALM_SECONDS = 25
QUIET_SECONDS = 10
LOST_SECONDS = 18  # without a login: nobody waits for that machine any more
PATIENCE = 90  # seconds until it serves again: systemd waits 20 before a start
QUESTION = json.dumps({"prompt": "a b", "max_tokens": 4})
# What a node shows in one login: microseconds in which all processes waited for memory, whether the
# model answers, states of two units, processes.
LOOK = f"""\
sed -n 's/^full.*total=//p' /proc/pressure/memory
curl -sf -m 5 -o /dev/null {URL}/v1/completions --json '{QUESTION}' && echo answers || echo silent
systemctl --user show -P ActiveState {UNIT}
systemctl show -P ActiveState storm
pgrep -f '[b]in/vllm serve|[V]LLM::Worker' | sort
"""
LOOK_LINES = 4  # and one for each process
# What the units said, for a storm that did not end well.
CONSOLE_END = 2000  # characters
JOURNAL = "journalctl --user --no-pager --output=short-monotonic --lines=60"
KILLED = re.compile(r"Out of memory: Killed process \d+ \(([^)]*)\)")
REASON = re.compile(r"GiB left")


@dataclass(frozen=True)
class Storm:
    """Who takes memory of which kind of hog.py, how fast, and when.

    A stranger, a program of another user, takes what there would be without the rank, and leaves.
    In ``calm`` ones the rank takes no more than there is, and has to live while it is asked.
    """

    who: Literal["rank", "stranger"]
    kind: str
    when: Literal["serving", "loading", "always"] = "serving"
    calm: int = 0  # MiB that it takes, 0 for more than there are
    pace: str = "fast"
    swap: bool = False

    @property
    def name(self) -> str:
        words = [self.who, self.kind, "swap" if self.swap else ""]
        words[1:1] = ["calm"] if self.calm else [self.pace]
        words[1:1] = [self.when] if self.when != "serving" else []
        return "-".join(filter(None, words))

    @property
    def words(self) -> str:
        """Return the words of hog.py."""
        is_stranger = self.who == "stranger"
        total = SOME[self.swap] if is_stranger else self.calm or ALL
        seconds = STRANGER_SECONDS if is_stranger else HOUR
        return f"{HOG} {self.kind} {PACES[self.pace]} {total} {seconds}"


PACED = (
    Storm("rank", "anonymous"),
    Storm("rank", "ownerless"),
    Storm("rank", "compilers"),
    Storm("rank", "ownerless", "loading"),
    Storm("stranger", "anonymous"),
    Storm("stranger", "ownerless"),
)
SINGLE = (
    Storm("rank", "ownerless", "always"),
    Storm("rank", "crowd"),
    Storm("stranger", "crowd"),
)
CALM = (
    Storm("rank", "ownerless", calm=250),  # to just above the floor
    Storm("rank", "cached", calm=1000),
    Storm("rank", "compilers", calm=120),
    Storm("rank", "waves", calm=200),
)


def make_storms() -> Iterator[Storm]:
    """Yield all storms without swap, then those with it."""
    for swap in (False, True):
        for pace, storm in product(PACES, PACED):
            yield replace(storm, pace=pace, swap=swap)
        for storm in (*SINGLE, *CALM):
            yield replace(storm, swap=swap)


STORMS = {storm.name: storm for storm in make_storms()}


@dataclass(kw_only=True)
class Logins:
    """Log in every few seconds while the block runs, and keep how long each login took.

    A login that is given up, or refused, counts as ``GONE`` seconds.
    """

    machine: Machine
    seconds: list[float] = field(default_factory=list)
    last_good: float = 0.0  # on the monotonic clock
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Logins:
        self.last_good = time.monotonic()
        self._thread = threading.Thread(target=self._log_in)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def worst(self) -> float:
        return max(self.seconds, default=0.0)

    @property
    def is_lost(self) -> bool:
        return time.monotonic() - self.last_good > LOST_SECONDS

    def _log_in(self) -> None:
        while not self._over.wait(LOGIN_PAUSE):
            began = time.monotonic()
            done = self.machine.user("true", seconds=GONE)
            took = time.monotonic() - began
            self.seconds.append(GONE if done.trouble else took)
            if not done.trouble:
                self.last_good = time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a storm: the slowest login, whom the kernel killed, and how it ended.

    ``stalled`` are the seconds in which all processes waited for memory, None if nobody can ask.
    ``journal`` has the last lines of the units and of the console where it did not end well.
    """

    storm: Storm
    end: str
    journal: str = ""
    is_right: bool = False
    worst: float = GONE
    stalled: float | None = None
    killed: Counter[str] = field(default_factory=Counter)

    @property
    def cells(self) -> tuple[str, ...]:
        worst = "none" if self.worst >= GONE else f"{self.worst:.1f}"
        killed = ", ".join(f"{n} {name}" for name, n in self.killed.most_common(4))
        if more := len(self.killed) - 4:
            killed += f", {more} more" * (more > 0)
        stalled = "–" if self.stalled is None else f"{self.stalled:.1f}"
        return (f"`{self.storm.name}`", worst, stalled, killed or "–", self.end)


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a node shows: whether the model answers, states of units, the ranks' processes.

    ``stalled`` are the seconds since its boot in which all processes waited for memory.
    """

    stalled: float
    answers: bool
    unit: str
    storm: str
    ranks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Sea:
    """A machine that serves, and the moment that each storm begins at."""

    machine: Machine
    floor: float
    calm_seconds: float

    def patchkit(self, *words: str, seconds: int = 120) -> Completed:
        """Run `patchkit …` on this machine; its ssh knows the node."""
        path = f"{self.machine.ssh_program}:{environ['PATH']}"
        home = str(self.machine.folder)
        env = {**environ, "PATH": path, "HOME": home, "PYTHONPATH": str(ROOT)}
        line = (sys.executable, "-m", "patchkit", *words)
        return attempt(*line, env=env, cwd=self.machine.folder, timeout=seconds)

    def prepare(self) -> None:
        """Install the stand-in, write the cluster's file, and start it."""
        machine = self.machine
        machine.root("sh", "-c", f"cat > {HOG}", input=PROGRAM.read_bytes())
        make_swap = f"fallocate -l {SWAP}M /swap && chmod 600 /swap && mkswap -q /swap"
        machine.root("sh", "-c", make_swap)
        fake_venv.install(machine)
        fake_venv.write_model(machine, MODEL)
        settings = {"LOAD": LOAD_SECONDS, "WEIGHTS": WEIGHTS, "STORM": 1}
        lines = "".join(f"FAKE_{key}={value}\n" for key, value in settings.items())
        fake_venv.write(machine, f"{MODEL}/fake.env", lines)
        cache = CACHE << 20
        (machine.folder / "cluster.toml").write_text(
            f'name = "vllm"\n[serve]\ntopology = "socket"\ntarget = "{DEVICE}"\n'
            f'args = ["--kv-cache-memory-bytes", "{cache}"]\n{self._floor_line()}'
            f'[[node]]\nssh = "{NODE}"\naddress = "{ADDRESS}"\n'
        )
        done = self.patchkit("up", MODEL)
        insist(not done.status, f"up: {done.output}{done.errors}")

    def _floor_line(self) -> str:
        return f"memory_floor = {self.floor}\n"

    def begin(self, storm: Storm) -> None:
        """Let it break out. It needs a login that ends before there is no memory."""
        machine = self.machine
        if storm.swap:
            machine.root("swapon", "/swap")
        if storm.who == "stranger":
            unit = ("systemd-run", "--quiet", f"--uid={STRANGER}", "--unit=storm")
            machine.root(*unit, "python3", *storm.words.split())
            return
        when = "again" if storm.when == "always" else "once"
        fake_venv.write(machine, f"{MODEL}/storm", f"{when} {storm.words}")
        if storm.when == "loading":
            machine.user("systemctl", "--user", "--no-block", "restart", UNIT)

    def measure_quiet(self) -> float:
        """Return the seconds of the slowest login while nothing takes memory."""
        self._begin_serving()
        with Logins(machine=self.machine) as logins:
            time.sleep(QUIET_SECONDS)
        return logins.worst

    def try_run(self, storm: Storm) -> Outcome:
        """Run a storm; one that cannot begin is a failure, and no other's."""
        try:
            return self.run(storm)
        except NodeError as error:
            return Outcome(storm=storm, end=f"FAILED: {error}")

    def run(self, storm: Storm) -> Outcome:
        """Let a storm rage; return what came of it."""
        machine = self.machine
        before = self._begin_serving()
        with Logins(machine=machine) as logins:
            self.begin(storm)
            end, is_right = self._wait_for_end(storm, before, logins)
        after = self._look()
        text = machine.console.read_text("utf-8", "replace")
        return Outcome(
            storm=storm,
            worst=logins.worst,
            stalled=after.stalled - before.stalled if after else None,
            killed=Counter(KILLED.findall(text)),
            end=end,
            is_right=is_right,
            journal="" if is_right else self._read_journal(text),
        )

    def _read_journal(self, console: str) -> str:
        done = self.machine.user(*JOURNAL.split(), seconds=PATIENCE)
        return f"{done.output}{done.trouble}\n{console[-CONSOLE_END:]}"

    def _begin_serving(self) -> Look:
        """Boot the machine; return what it shows as soon as the model answers."""
        self.machine.put_back()
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            look = self._look()
            if look is not None and look.answers:
                return look
            time.sleep(1)
        raise NodeError(f"{self.machine.name} does not serve after a boot")

    def _look(self) -> Look | None:
        done = self.machine.user("sh", "-c", LOOK, seconds=GONE)
        lines = done.output.splitlines()
        if len(lines) < LOOK_LINES:
            return None
        stalled, answer, unit, storm, *ranks = lines
        return Look(
            stalled=int(stalled) / 1e6,
            answers=answer == "answers",
            unit=unit,
            storm=storm,
            ranks=tuple(ranks),
        )

    def _stay_calm(self, before: Look, logins: Logins) -> tuple[str, bool]:
        look: Look | None = before
        calm_end = time.monotonic() + self.calm_seconds
        while not logins.is_lost:
            look = self._look()
            if look is not None and time.monotonic() > calm_end:
                break

        if look is None:
            return "lost", False
        lives = look.ranks == before.ranks
        return ("the rank lives", True) if lives else ("FALSE KILL", False)

    def _wait_for_end(
        self, storm: Storm, before: Look, logins: Logins
    ) -> tuple[str, bool]:
        if storm.calm:
            return self._stay_calm(before, logins)

        look: Look | None = before
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            time.sleep(4)
            look = self._look()
            if logins.is_lost:
                return "lost", False
            if look is None or look.storm == "active":
                continue
            if look.unit == "failed":
                return self._read_reason()
            is_other = not set(look.ranks) & set(before.ranks)
            if look.answers and (is_other or storm.who == "stranger"):
                return "served again" if is_other else "the rank lives", True
        if look is not None and look.answers:
            return "the rank lives", True
        return "not served", False

    def _read_reason(self) -> tuple[str, bool]:
        """Return what `status` says of a group that stays down."""
        said = self.patchkit("status")
        reasons = [
            line.strip() for line in said.output.splitlines() if REASON.search(line)
        ]
        return f"stopped: {' '.join(reasons)[:200]}", bool(reasons)


HEADER = (
    "storm",
    "slowest login, s",
    "all waited for memory, s",
    "killed by the kernel",
    "end",
)


@dataclass(frozen=True, kw_only=True)
class Order:
    """Which storms to run, with the guard, without it, or both."""

    work: Path
    names: Sequence[str]
    halves: Sequence[str]
    calm_seconds: float
    rows: Path | None


def run_all(order: Order) -> int:
    """Run the halves, print rows as they come, and return the exit code."""
    base = virtual_machine.ready(order.work)
    print(f"one CPU and {MEMORY} MiB for each machine")
    print(table(("guard", *HEADER), []), end="", flush=True)
    outcomes = {half: run_half(order, base, half) for half in order.halves}

    for half, half_outcomes in outcomes.items():
        print(f"\n{half} the guard: {summarize(half_outcomes)}")
    holds = all(
        outcome.worst <= LOGIN_SECONDS and outcome.is_right
        for outcome in outcomes.get("with", [])
    )
    return 0 if holds else 1


def run_half(order: Order, base: Base, half: str) -> list[Outcome]:
    """Run the storms on a machine with a floor, one after the other."""
    outcomes: list[Outcome] = []
    with virtual_machine.running(
        NODE, order.work / half, base, memory=MEMORY
    ) as machine:
        sea = Sea(machine=machine, floor=FLOORS[half], calm_seconds=order.calm_seconds)
        sea.prepare()
        machine.save()
        print(f"{half}: quiet, a login takes {sea.measure_quiet():.1f} s", flush=True)
        for name in order.names:
            outcome = sea.try_run(STORMS[name])
            outcomes.append(outcome)
            row = table((half, *outcome.cells), []).splitlines()[0]
            print(f"{row}\n{outcome.journal}".rstrip(), flush=True)
            if order.rows:
                with order.rows.open("a", encoding="utf-8") as file:
                    file.write(f"{row}\n")
    return outcomes


def summarize(outcomes: Sequence[Outcome]) -> str:
    """Return in how many storms it answered and ended well, and how many calm ranks were killed."""
    storms = [outcome for outcome in outcomes if not outcome.storm.calm]
    calm = [outcome for outcome in outcomes if outcome.storm.calm]
    answers = sum(outcome.worst <= LOGIN_SECONDS for outcome in storms)
    right = sum(outcome.is_right for outcome in storms)
    killed = sum(not outcome.is_right for outcome in calm)
    return (
        f"a login within {LOGIN_SECONDS:.0f} s in {answers} of {len(storms)} storms; served again, "
        f"or stopped with the reason, in {right}; {killed} false kills in {len(calm)} calm loads"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="nox -s memory-storms")
    parser.add_argument("work", type=Path)
    parser.add_argument("--half", choices=[*FLOORS], help="by default both")
    parser.add_argument(
        "--calm",
        type=float,
        default=CALM_SECONDS,
        help="seconds of a load that fits; default: %(default)s",
    )
    parser.add_argument("--rows", type=Path, help="a file to append the rows to")
    parser.add_argument("name", nargs="*", metavar="STORM")
    given = parser.parse_intermixed_args()
    if unknown := sorted(set(given.name) - set(STORMS)):
        known = ", ".join(STORMS)
        parser.error(f"not known: {', '.join(unknown)}; there are {known}")
    order = Order(
        work=given.work.resolve(),
        names=given.name or [*STORMS],
        halves=[given.half] if given.half else [*FLOORS],
        calm_seconds=given.calm,
        rows=given.rows,
    )
    return run_all(order)


if __name__ == "__main__":
    sys.exit(main())
