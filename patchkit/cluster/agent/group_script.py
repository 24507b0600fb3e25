"""Tie the ranks of one model together: what the units of a cluster run, by systemd, on each node.

    group.py begin      before the head's server: end with 1 if a rank or its port is missing
    group.py ready      after the head's server: end once a token has come back
    group.py ray        after Ray's head: end once it listens
    group.py spread     on the head, after the first token: give workers the compiled code they lack
    group.py watch N    on the head: start rank N on its node, watch it, stop it
    group.py hold ID    on a worker: its end of the same, run by `watch` over ssh
    group.py held       in a unit that `hold` makes, and that the rank's unit needs: the rest of it

This file is copied to the nodes and runs there with the standard library and the few files beside
it; `group.json` says what it ties together. vLLM itself does not tell one rank of another's end: a
worker whose head is gone waits for ever, and a head learns of a lost worker by the next request.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from patchkit.http_exchange import HttpServer, usable_key

Settings = dict[str, Any]  # of group.json, or what it says of a worker
ALONE = "-sEB"
"""How Python runs a script beside others: nothing of the user's own, and no bytecode left there."""

MARK = "PATCHKIT_CLUSTER"
"""The variable that every process of a group has: so what is left of one can be found."""

HEARTBEAT = 2.0  # seconds between two signs of life of the head
SILENCE = 15.0  # seconds without one after which a rank is stopped, or given up
_AGAIN = 5.0  # seconds between two tries to reach a worker
# Before what the rank's end of a link says: a login, ssh and systemd-run write to the same pipe.
_RANK_WORD = "patchkit-rank: "
_STARTED = "started"
ANSWERED = "answered: "  # how the line begins that says that a start has ended well
_FIRST_TOKEN = 600.0  # seconds for one answer; the first one may compile kernels
NOT_HERE = (400, 404, 405, 501)  # answers of a server that has no such question
QUESTIONS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "1", "max_tokens": 1, "temperature": 0},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "1"}],
        "max_tokens": 1,
    },
    "/v1/embeddings": {"input": "1"},
    "/pooling": {"input": "1"},
}
_ANSWERED = ("choices", "data")  # of which an answer has the first one
_TAKEN = "the server's port is taken"
_SPREAD_SECONDS = (
    60.0  # for all workers: a unit's start has 90, and what waits for it is a watch
)
_SPREAD_BYTES = 4 << 30
_SETTLED = 30.0  # seconds since a file's last change, after which it is whole
# What a worker can find by its keys; not what is one rank's, nor what ranks have to agree on.
_SPREADS = re.compile(
    r"(?:cuda|triton|quack)/|flashinfer/.*/(?:cached_ops|generated)/|models/.*/(?:inductor|triton)_cache/"
)
_SYSTEMCTL = ("systemctl", "--user")
_PROCESS = re.compile(r'users:\(\("(.*?)",pid=(\d+)')
# Longer than a process's name can be, which stands before it; a control group's stands behind it.
_USER = re.compile(r" uid:(\d+) ino:\d+ sk:")


def main(*works: Callable[..., None]) -> None:
    """Do what the first argument names."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    settings = json.loads(
        Path(__file__).with_name("group.json").read_text(encoding="utf-8")
    )
    verb, *rest = sys.argv[1:]
    verbs = {work.__name__: work for work in works}
    try:
        verbs[verb](settings, *rest)
    except KeyboardInterrupt:  # what asked for it says why
        sys.exit(1)


def say(text: str) -> None:
    """Write a line to the journal, or to the other end."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def leave(code: int, text: str) -> NoReturn:
    """Say why, and end."""
    say(text)
    sys.exit(code)


def begin(settings: Settings) -> None:
    """Check that all that the server needs was started, and that its port is free."""
    _require_units(settings)
    for other in strangers(settings["url"], settings["unit"]):
        leave(1, f"error: {_TAKEN}: {other}")


def _require_units(settings: Settings) -> None:
    """End with 1 unless the units of all ranks, and of Ray, run."""
    needed = [f"worker@{rank}" for rank in settings["workers"]]
    needed += ["ray"] if "ray" in settings else []
    for name in needed:
        unit = settings["unit"].replace(".service", f"-{name}.service")
        if show_property(unit, "ActiveState") != "active":
            leave(1, f"error: {unit} does not run: {_describe_ending(unit)}")


def strangers(url: str, unit: str, name: str = "") -> list[str]:
    """Return who else listens where a server is asked: processes of other units.

    With ``name`` those of a cluster's containers are its own: their control group is an engine's.
    """
    stem = unit.removesuffix(".service")
    others = []
    for listener in listeners_at(url):
        process = Path(f"/proc/{listener.pid}")
        ours = bool(name) and has_mark(process, name)
        with contextlib.suppress(OSError):  # it ended
            groups = re.split("[/\n]", (process / "cgroup").read_text(errors="replace"))
            ours = ours or any(
                part == unit or part.startswith(f"{stem}-") for part in groups
            )
        if not ours:
            cluster = read_mark(process)
            part = f" of the cluster {cluster}" if cluster else ""
            others.append(
                f"{listener.address} port {listener.port}: {listener.holder}{part}"
            )
    return others


def listeners_at(url: str) -> list[Listener]:
    """Return who listens where a URL of this machine leads to; without ss nobody is known."""
    place = urllib.parse.urlsplit(url)
    addresses = {"0.0.0.0", "::"}  # noqa: S104 - who listens there is meant
    with contextlib.suppress(OSError):  # a name that nobody knows
        rows = socket.getaddrinfo(place.hostname, place.port, type=socket.SOCK_STREAM)
        addresses |= {_plain_address(str(address[0])) for *_, address in rows}
    try:
        listeners = list(find_listeners([place.port or 80]))
    except OSError:
        return []
    return [listener for listener in listeners if listener.address in addresses]


def has_mark(process: Path, name: str) -> bool:
    """Return whether a process, by its folder in /proc, is one of a cluster's group."""
    return read_mark(process) == name


def read_mark(process: Path) -> str:
    """Return the name of the cluster whose group has a process, by its folder in /proc; or ""."""
    environ = b""
    with contextlib.suppress(OSError):  # it ended, or is not ours
        environ = (process / "environ").read_bytes()
    variables = (entry.partition(b"=") for entry in environ.split(b"\0"))
    marks = [value for name, _, value in variables if name == MARK.encode()]
    return marks[0].decode(errors="replace") if marks else ""


@dataclass(frozen=True)
class Listener:
    """Who listens at a port, as which user; ``pid`` is 0 for a process of another user."""

    address: str
    port: int
    pid: int = 0
    name: str = ""
    user: int = 0

    @property
    def holder(self) -> str:
        """Return who it is, for a reader."""
        return (
            f"{self.name} (process {self.pid})"
            if self.pid
            else "another user's process"
        )


def find_listeners(ports: Collection[int]) -> Iterator[Listener]:
    """Yield who listens at these TCP ports, of IPv4 and IPv6. Raises OSError without ss."""
    for line in run_tool("ss", "-Hltnpe").stdout.splitlines():
        address, _, port = line.split()[3].rpartition(":")
        if not (port.isdigit() and int(port) in ports):
            continue
        process = _PROCESS.search(line)
        user = _USER.search(line)  # left out for root
        yield Listener(
            address=_plain_address(address),
            port=int(port),
            pid=int(process[2]) if process else 0,
            name=process[1] if process else "",
            user=int(user[1]) if user else 0,
        )


def _plain_address(text: str) -> str:
    """Return an address as all spellings of it: no device, and IPv4 as such where it is mapped.

    Who listens at ``::ffff:127.0.0.1`` gets what is sent to 127.0.0.1.
    """
    bare = text.partition("%")[0].strip("[]").replace("*", "::")
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(bare)
        return str(getattr(address, "ipv4_mapped", None) or address)
    return bare


def ready(settings: Settings) -> None:
    """Wait until the server has answered a token; end with 1 if it is gone before."""
    # A rank that ended before the server's process was there had nothing to take along.
    _require_units(settings)
    server = own_server(settings)
    began = time.monotonic()
    while server.ask("/health").status != 200:
        _check_alive()
        time.sleep(0.5)
    loaded = time.monotonic() - began
    say(f"loaded after {loaded:.1f} s; asking for a token")

    while True:
        # Before each question, which carries the key: whoever listens may have changed.
        for other in strangers(settings["url"], settings["unit"], settings["name"]):
            leave(1, f"error: {_TAKEN}: {other}")
        reply = ask_token(server)
        if not reply.refusal:
            break
        # Those are not about the model, and will be the same the next time.
        if reply.status in (401, 403):
            hint = "is VLLM_API_KEY in the env?"
            leave(1, f"the server refuses its own machine: {reply.refusal}; {hint}")
        say(f"no token yet: {reply.refusal}")
        _check_alive()
        time.sleep(2)
    say(f"{ANSWERED}{reply.model}, {time.monotonic() - began - loaded:.1f} s later")


def ray(settings: Settings) -> None:
    """Wait until Ray's head listens; end with 1 if it is gone before."""
    host, _, port = settings["ray"].rpartition(":")
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, int(port)), 5),
        ):
            return
        _check_alive()
        time.sleep(0.5)


def spread(settings: Settings) -> None:
    """Copy compiled code to workers that lack it: nothing over what is there, nothing back."""
    names, size, began = [], 0, time.monotonic()
    own = Path.home() / settings["caches"]
    for place, _folders, files in os.walk(own):  # which follows no links
        for path in (f"{place}/{name}" for name in files):
            name = os.path.relpath(path, own)
            with contextlib.suppress(OSError):  # it is gone
                its = os.lstat(path)
                settled = time.time() - its.st_mtime > _SETTLED
                if stat.S_ISREG(its.st_mode) and settled and _SPREADS.match(name):
                    size += its.st_size
                    names.append(name)
    if size > _SPREAD_BYTES:
        leave(0, f"{own} has {size >> 20} MiB: too much to give to workers")
    for worker in settings["workers"].values() if names else ():
        *ssh, _dashes, host = worker["ssh"]
        words = [
            "rsync",
            "-a",
            "--ignore-existing",
            "--stats",
            "--files-from=-",
            "--from0",
        ]
        words += [
            "-e",
            " ".join(ssh),
            str(own),
            f"{host}:{settings['caches']}/",
        ]  # of its home
        left, given = (
            max(1.0, _SPREAD_SECONDS - (time.monotonic() - began)),
            "no time was left",
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                words,
                input="\0".join(names),
                capture_output=True,
                text=True,
                timeout=left,
            )
            said = re.search(r"files transferred: ([\d,]+)", done.stdout)
            given = (
                f"{said[1]} files of compiled code"
                if said
                else done.stderr.strip()[-300:]
            )
        say(f"{worker['node']}: {given}")


def _check_alive() -> None:
    # Else this would go on asking after the server's death, and hold the unit in its start.
    if process := int(os.environ.get("MAINPID", "0")):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            leave(1, "it ended before it had answered")


@dataclass(frozen=True)
class TokenReply:
    """How a model was asked for a token: ``refusal`` says why none came, "" if one did."""

    model: str = ""
    status: int = 0
    refusal: str = ""


def own_server(settings: Settings) -> HttpServer:
    """Return the group's server, with the key that its unit has."""
    return HttpServer(settings["url"], usable_key(os.environ.get("VLLM_API_KEY", "")))


def ask_token(server: HttpServer) -> TokenReply:
    """Ask for one token; of a model that does not generate, for one embedding or score.

    Whoever calls this has looked who listens: a key goes with it.
    """
    listing = server.ask("/v1/models")
    model = listing.value("data", 0, "id")
    if not isinstance(model, str):
        refusal = (
            listing.trouble or f"/v1/models says {listing.status}, and names no model"
        )
        return TokenReply(status=listing.status, refusal=refusal)

    for path, question in QUESTIONS.items():
        answer = server.ask(path, {"model": model, **question}, _FIRST_TOKEN)
        if answer.status not in NOT_HERE:
            break
    refusal = answer.trouble
    if answer.status != 200:
        refusal = refusal or f"{path} says {answer.status}"
    elif not any(isinstance(answer.value(name, 0), dict) for name in _ANSWERED):
        refusal = refusal or f"what came from {path} is no answer of the OpenAI API"
    return TokenReply(model=server.clean(model), status=answer.status, refusal=refusal)


def watch(settings: Settings, rank: str) -> None:
    """Start a rank on its node, say so to systemd, and end when it ends; stop it if asked to."""
    worker = settings["workers"][rank]
    link = None
    try:
        link = _connect(worker, settings)
        notify("READY=1\nSTATUS=")
        say(f"{worker['node']}: rank {rank} is started")
        ending = _follow_link(link)

        # What had answered did not crash: systemd counts its starts from here.
        served = show_property(settings["unit"], "ActiveState") == "active"
        if ending.lost and served:
            run_tool(*_SYSTEMCTL, "reset-failed", settings["unit"])
        leave(1, f"{worker['node']}: {ending.text}")
    except KeyboardInterrupt:
        if link:
            _stop_link(link, worker["node"])


@dataclass(frozen=True)
class LinkEnding:
    """How a link ended: ``lost``, or by what the rank's own end of it says in ``text``."""

    text: str
    lost: bool


def _follow_link(link: subprocess.Popen[str]) -> LinkEnding:
    """Show signs of life to the other end, and count on its own, until one of the two ends."""
    assert link.stdin
    assert link.stdout
    heard = time.monotonic()
    last_words = ""
    while True:
        with contextlib.suppress(BrokenPipeError):
            link.stdin.write("\n")
            link.stdin.flush()

        readable, _, _ = select.select([link.stdout], [], [], HEARTBEAT)
        if readable:
            heard = time.monotonic()
            line = link.stdout.readline()
            if not line:
                return LinkEnding(
                    f"the link is lost: {last_words}".removesuffix(": "), lost=True
                )
            if word := read_rank_word(line):
                return LinkEnding(word, lost=False)
            last_words = line.strip() or last_words
        elif time.monotonic() - heard > SILENCE:
            link.kill()
            return LinkEnding(f"no sign of life for {SILENCE:.0f} s", lost=True)


def _stop_link(link: subprocess.Popen[str], node: str) -> None:
    """Let the other end stop its rank, and say whether it did."""
    assert link.stdin
    with contextlib.suppress(BrokenPipeError):
        link.stdin.write("stop\n")
        link.stdin.close()

    # A rank that does not end by itself is killed there after TimeoutStopSec.
    with contextlib.suppress(subprocess.TimeoutExpired):
        link.wait(60)
    link.kill()
    if link.returncode == 0:
        say(f"{node}: stopped")
    else:
        say(
            f"{node}: did not say that it stopped; it stops within {SILENCE:.0f} s of silence"
        )


def _connect(worker: Settings, settings: Settings) -> subprocess.Popen[str]:
    """Return the link to a worker whose rank was started; wait while it cannot be reached.

    Only a word of the rank's own end makes this start fail: whatever else ends a link, a login that
    is refused or a node that just boots, is waited for.
    """
    last = ""
    while True:
        link = subprocess.Popen(
            worker_words(worker, settings, f"{ALONE} group.py hold"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a signal to this process is not one to ssh
        )
        assert link.stdout
        words = ""
        for line in link.stdout:
            word = read_rank_word(line)
            if word == _STARTED:
                return link
            if word:
                leave(1, f"error: {worker['node']}: {word}")
            words = line.strip() or words

        link.wait()
        reason = f"{worker['node']}: {words or 'no answer'}"
        if reason != last:
            say(f"waiting for {reason}")
            notify(f"STATUS=waiting for {reason}")
            last = reason
        time.sleep(_AGAIN)


def say_rank_word(text: str) -> None:
    """Write to the head's end of the link what only the rank's end of it can know."""
    # A login may have printed something without the end of a line.
    say(f"\n{_RANK_WORD}{text}")


def read_rank_word(line: str) -> str:
    """Return what the rank's end of a link says in a line, "" for a line of anything else."""
    word = line.strip()
    return word.removeprefix(_RANK_WORD) if word.startswith(_RANK_WORD) else ""


def leave_link(code: int, text: str) -> NoReturn:
    """Say why to the head's end of the link, and end."""
    say_rank_word(text)
    sys.exit(code)


def worker_words(
    worker: Settings, settings: Settings, script: str, *more: object
) -> list[str]:
    """Return the words that run a script, ``OPTION FILE VERB``, on a worker: for this start."""
    # The folder is below the home, where ssh begins.
    option, file, verb = script.split()
    place = f".config/patchkit/{settings['name']}/{file}"
    words = ("exec python3", option, place, verb, settings["id"], *more)
    return [*worker["ssh"], " ".join(map(str, words))]


def notify(state: str) -> None:
    if place := os.environ.get("NOTIFY_SOCKET", ""):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
            bell.connect("\0" + place[1:] if place.startswith("@") else place)
            bell.sendall(state.encode())


def enter_start(settings: Settings, group: str) -> None:
    """Let systemctl be used over ssh; end where another start wrote this node's files."""
    os.environ.setdefault("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    if settings["id"] != group:
        leave_link(3, "its files are of another start: run `patchkit up` again")


def hold(settings: Settings, group: str) -> NoReturn:
    """Go on as a unit that the rank's own needs: however this process ends, the rank does."""
    enter_start(settings, group)
    rank = settings["unit"]
    unit = rank.replace(".service", "-hold.service")
    run_tool(*_SYSTEMCTL, "stop", unit, rank)  # of a link that is lost
    words = (
        "systemd-run",
        "--user",
        "--quiet",
        "--pipe",
        "--collect",
        f"--unit={unit}",
    )
    python = (sys.executable, ALONE, __file__, "held")
    os.execvp(words[0], [*words, f"--property=Wants={rank}", *python])  # noqa: S606


def held(settings: Settings) -> None:
    """Start this node's rank; stop it when the head asks, is gone or is silent."""
    unit = settings["unit"]
    done = run_tool(*_SYSTEMCTL, "start", unit)
    if done.returncode:
        leave_link(1, f"{unit} does not start: {done.stderr.strip()}")
    process = int(show_property(unit, "MainPID") or 0)
    try:
        rank = os.pidfd_open(process)
    except (OSError, ValueError):
        leave_link(1, f"{unit} ended at once: {_describe_ending(unit)}")
    say_rank_word(_STARTED)
    try:
        ending = _await_end(rank)
    except (KeyboardInterrupt, BrokenPipeError):
        ending = "gone"
    run_tool(*_SYSTEMCTL, "stop", unit)
    # The end of a node that is shut down is none of the rank's.
    if ending == "ended" and not _is_shutting_down():
        leave_link(1, f"the rank ended: {_describe_ending(unit)}")
    sys.exit(0 if ending == "asked" else 1)


def _await_end(rank: int) -> str:
    """Return why the rank has to stop: it ``ended``, was ``asked`` to, or the head is ``gone``."""
    heard = time.monotonic()
    beat = heard
    while True:
        readable, _, _ = select.select([0, rank], [], [], HEARTBEAT)
        now = time.monotonic()
        if rank in readable:
            return "ended"
        if 0 in readable:
            data = os.read(0, 4096)
            if b"stop" in data:
                return "asked"
            if not data:
                return "gone"
            heard = now
        elif now - heard > SILENCE:
            return "gone"
        if now - beat >= HEARTBEAT:
            say("")  # the head counts on it
            beat = now


def _is_shutting_down() -> bool:
    """Return whether the user's systemd stops everything, or is gone."""
    state = run_tool(*_SYSTEMCTL, "is-system-running").stdout.strip()
    return state in ("stopping", "offline", "unknown", "")


def _describe_ending(unit: str) -> str:
    """Return how a unit ended, in systemd's words."""
    return f"{show_property(unit, 'Result')}, status {show_property(unit, 'ExecMainStatus')}"


def show_property(unit: str, what: str) -> str:
    return run_tool(
        *_SYSTEMCTL, "show", f"--property={what}", "--value", unit
    ).stdout.strip()


def run_tool(
    *words: str, seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=seconds,
    )


if __name__ == "__main__":
    main(begin, ready, ray, spread, watch, hold, held)
