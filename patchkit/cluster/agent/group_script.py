"""Tie the ranks of one model together: the units of a cluster run this script on each node.

    group.py begin      before the head's server: fail if a rank does not run or the port is taken
    group.py ready      after the start of the head's server: wait for its first token
    group.py ended      after the end of the head's server: if that was for memory, choose a smaller
                        cache for the next start, or let none follow
    group.py spread     on the head, after the first token: give workers the compiled code they lack
    group.py watch N    on the head: start rank N on its node, watch it, stop it
    group.py hold ID    on a worker: the worker's end of the link; `watch` runs it over ssh
    group.py held       on a worker, in a unit that `hold` makes: start the rank, stop it

This file is copied to the nodes and runs there with the standard library and the few files beside
it; `group.json` lists the ranks. vLLM does not tell one rank that another one has ended: a worker
without its head waits for ever, and a head learns of a lost worker by the next request.
"""

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
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from patchkit.cluster.agent.memory_record import (
    STAYS_DOWN,
    clean_text,
    encode_stop,
    parse_stop,
    read_stop,
    record_path,
    write_record,
    write_stop,
)
from patchkit.cluster.agent.processes import run_tool, strangers
from patchkit.foreign import read_count, whole_number
from patchkit.http_exchange import HttpAnswer, HttpServer, PathAnswer, usable_key

Settings = dict[str, Any]  # the content of group.json, or of its entry for one worker
ALONE = "-sEB"
"""Options of Python for the scripts on nodes: ignore the user's settings, write no bytecode."""


HEARTBEAT = 2.0  # seconds between two signs of life on a link, from either end
SILENCE = 15.0  # seconds without one after which a worker stops its rank, and the head gives it up
_AGAIN = 5.0  # seconds between two tries to reach a worker
# Begins what the worker's end of a link says: a login, ssh and systemd-run write to the same pipe.
_RANK_WORD = "patchkit-rank: "
_STARTED = "started"
_WAITS = "waits: "  # begins what a worker's guard says before its rank starts
ANSWERED = "answered: "  # begins the last line of a start that succeeded
_FIRST_TOKEN = 600.0  # seconds for one answer; the first one may compile kernels
NOT_HERE = (400, 404, 405, 501)  # statuses of HTTP where a model does not serve a path
QUESTIONS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "1", "max_tokens": 1, "temperature": 0},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "1"}],
        "max_tokens": 1,
        "temperature": 0,
    },
    "/v1/embeddings": {"input": "1"},
    "/pooling": {"input": "1"},
}
_ANSWERED = ("choices", "data", "usage")  # an answer has one of these
# The fields of an answer that hold text. vLLM sends reasoning_content up to 0.15, and reasoning
# from 0.11.1 on. A completion has `text`; `refusal` replaces content if the model declines.
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal", "text")
EMBEDDING = ("data",)
"""The field with the results in an answer of a model that embeds or scores."""
_MOST_TOKENS = 1 << 40
# Where answers hold the text of an error: vLLM up to 0.10 and FastAPI send it at the top level.
_ERRORS = (
    ("error", "message"),
    ("error", "detail"),
    ("message",),
    ("detail",),
    ("error",),
)
_TAKEN = "the server's port is taken"
# For all workers together: the unit of the watch waits for it, and its start may take 90.
_SPREAD_SECONDS = 60.0
_RSYNC = ("rsync", "-a", "--ignore-existing", "--stats", "--files-from=-", "--from0")
_SPREAD_BYTES = 4 << 30  # the most that workers are given
_SETTLED = "30"  # seconds, while servers may still write
# Compiled code that any rank finds by the file's name. Code of one rank alone, and code on which
# ranks must agree, stays.
_SPREADS = re.compile(
    r"(?:cuda|triton|quack)/|flashinfer/.*/(?:cached_ops|generated)/|models/.*/(?:inductor|triton)_cache/"
)
_SYSTEMCTL = ("systemctl", "--user")
SMALLER = "PATCHKIT_SMALLER"
"""The variable with the flag of `vllm serve` for a cache that is smaller than planned."""
MISSING = "PATCHKIT_MISSING"
"""The variable with the GiB by which that is smaller, on every node."""

_GIB = 1 << 30
_FRESH = 60.0  # seconds: an older kill is not why a rank ended


def main(*works: Callable[..., None]) -> None:
    """Run the function that the first argument names, with the settings and the other arguments."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)

    file = Path(__file__).with_name("group.json")
    settings = json.loads(file.read_text(encoding="utf-8"))

    verb, *arguments = sys.argv[1:]
    verbs = {work.__name__: work for work in works}
    try:
        verbs[verb](settings, *arguments)
    except KeyboardInterrupt:  # a signal: its sender tells the user why
        sys.exit(1)


def say(text: str) -> None:
    """Write a line to the journal or, on a link, to the other end."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def leave(code: int, text: str) -> NoReturn:
    """Say why this script ends, and end it with the status ``code``."""
    say(text)
    sys.exit(code)


def begin(settings: Settings) -> None:
    """End with 1 unless the units that the server needs run, and its port is free."""
    _require_units(settings)
    for stranger in strangers(settings["url"], settings["unit"]):
        leave(1, f"error: {_TAKEN}: {stranger}")


def _require_units(settings: Settings) -> None:
    """End with 1 unless the units of all ranks run."""
    for rank in settings["workers"]:
        unit = settings["unit"].replace(".service", f"-worker@{rank}.service")
        if show_property(unit, "ActiveState") != "active":
            leave(1, f"error: {unit} does not run: {_describe_ending(unit)}")


def ready(settings: Settings) -> None:
    """Wait until the server has given a token.

    Ends with 1 if a needed unit does not run, the server is gone, another program listens at its
    port, or it refuses this node's key.
    """
    # A rank that ended before the server's process began did not stop the server.
    _require_units(settings)
    server = own_server(settings)
    address = (settings["url"], settings["unit"], settings["name"])
    began = time.monotonic()

    while server.ask("/health").status != 200:
        _check_alive()
        time.sleep(0.5)
    loaded = time.monotonic() - began
    say(f"loaded after {loaded:.1f} s; asking for a token")

    while True:
        # Each question carries the key, and another program may listen by now.
        for stranger in strangers(*address):
            leave(1, f"error: {_TAKEN}: {stranger}")
        reply = ask_token(server, server.ask("/v1/models"))
        if not reply.refusal:
            break

        # These refusals do not depend on the model: the next answer would be the same.
        if reply.status in (401, 403):
            hint = "is VLLM_API_KEY in the env?"
            leave(1, f"the server refuses its own machine: {reply.refusal}; {hint}")

        say(f"no token yet: {reply.refusal}")
        _check_alive()
        time.sleep(2)

    say(f"{ANSWERED}{reply.model}, {time.monotonic() - began - loaded:.1f} s later")


def ended(settings: Settings) -> None:
    """If the guard of any node ended this start, let the next one take a smaller cache, once."""
    stop = read_stop(settings["name"], settings["id"])
    if stop is None or stop.after or time.time() - stop.time > _FRESH:
        return

    flag = smaller_cache(settings, stop.missing)
    trouble = "no smaller cache is tried"
    if flag and not os.environ.get(SMALLER):
        trouble = keep_cache(settings, stop.missing)

    after = f"the next start takes {stop.missing} GiB less: {flag}"
    if trouble:
        after = f"{STAYS_DOWN}{trouble}; `patchkit up` starts it again"
        run_tool(*_SYSTEMCTL, "stop", "--no-block", settings["unit"])
    write_stop(settings["name"], replace(stop, after=after))
    say(f"memory: {after}")


def smaller_cache(settings: Settings, missing: float) -> str:
    """Return the flag for a cache that is ``missing`` GiB smaller than planned.

    Where that does not hold the longest context, a flag for a shorter one follows. Returns "" if
    nothing is missing, or if it holds no context that is worth a start.
    """
    flag, value, contexts = settings["cache"]
    if flag.endswith("-bytes"):
        smaller = int(value - missing * _GIB)
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        smaller = round(value - missing * _GIB / total, 3)
        contexts = [(0.0, "")]

    lengths = [words for least, words in contexts if smaller > least]
    return f"{flag} {smaller}{lengths[0]}" if flag and missing and lengths else ""


def keep_cache(settings: Settings, missing: float) -> str:
    """Let the starts of this node's rank take the cache of ``smaller_cache``, else the planned.

    Returns why that cannot be written, "" if it is; a start then takes the cache of the last one.
    """
    path = record_path(settings["name"], "env")
    flag = smaller_cache(settings, missing)
    try:
        if missing:
            content = f"{SMALLER}={flag}\n{MISSING}={missing}\n"
            write_record(settings["name"], "part", content.encode())
            path.with_suffix(".part").replace(path)
        else:  # on a full disk nothing could be written
            path.unlink(missing_ok=True)
    except OSError as error:
        return str(error)
    return ""


def read_missing() -> float:
    """Return the GiB by which this start's cache is smaller than planned."""
    with suppress(ValueError):
        return read_count(os.environ.get(MISSING, ""))
    return 0.0


def spread(settings: Settings, settled: str = _SETTLED) -> None:
    """Copy the head's compiled code to workers that lack it; files that are there stay.

    ``settled`` are the seconds since a file's last change after which it is whole. Ends with 0 if
    the code is larger than ``_SPREAD_BYTES``. A copy that fails is only said.
    """
    began = time.monotonic()
    cache = Path.home() / settings["caches"]
    sizes = _find_compiled_code(cache, float(settled))
    size = sum(sizes.values())
    if size > _SPREAD_BYTES:
        leave(0, f"{cache} has {size >> 20} MiB: too much to give to workers")
    if not sizes:
        return

    for worker in settings["workers"].values():
        *ssh, _dashes, host = worker["ssh"]
        target = f"{host}:{settings['caches']}/"  # below the home
        seconds = max(1.0, _SPREAD_SECONDS - (time.monotonic() - began))
        words = [*_RSYNC, "-e", " ".join(ssh), str(cache), target]
        outcome = _copy_files(words, sizes, seconds)
        say(f"{worker['node']}: {outcome}")


def _find_compiled_code(cache: Path, settled: float) -> dict[str, int]:
    """Return the bytes of each file that workers can use, by its path in the cache."""
    sizes = {}
    # os.walk does not follow links to folders.
    for folder, _folders, files in os.walk(cache):
        for file in files:
            path = Path(folder, file)
            name = str(path.relative_to(cache))
            with suppress(OSError):  # it is gone
                status = path.lstat()
                is_whole = time.time() - status.st_mtime > settled
                if stat.S_ISREG(status.st_mode) and is_whole and _SPREADS.match(name):
                    sizes[name] = status.st_size
    return sizes


def _copy_files(
    words: list[str],
    names: Iterable[str],
    seconds: float,
) -> str:
    """Run rsync for the files ``names``, for at most ``seconds``; return the outcome in words."""
    try:
        done = subprocess.run(
            words,
            input="\0".join(names),
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return "no time was left"
    except OSError as error:
        return str(error)

    if count := re.search(r"files transferred: ([\d,]+)", done.stdout):
        return f"{count[1]} files of compiled code"
    return done.stderr.strip()[-300:]


def _check_alive() -> None:
    """End with 1 if the main process of the unit is gone: its start would go on for ever."""
    if process := int(os.environ.get("MAINPID", "0")):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            leave(1, "it ended before it had answered")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAnswer(PathAnswer):
    """The answer to a question for tokens; ``model`` is the one that was asked, "" for none.

    ``fields`` are the names of the fields that hold text. ``tokens`` is the number that the server
    counted, None if it gave none. ``finish`` is the server's reason for ending the answer, ``said``
    the text of its error.
    """

    model: str = ""
    fields: tuple[str, ...] = ()
    tokens: int | None = None
    finish: str = ""
    said: str = ""

    @property
    def came(self) -> bool:
        """Return whether a token came, or an embedding."""
        return self.status == 200 and bool(self.fields or self.tokens)

    @property
    def refusal(self) -> str:
        """Return why no token came, in the server's words if it gave a reason; "" if one came."""
        if self.came:
            return ""
        if self.status not in (0, 200) and not self.trouble:
            return f"HTTP {self.status} {self.said}".rstrip()
        return self.trouble or self.said or "an answer without a token"


def own_server(settings: Settings) -> HttpServer:
    """Return the server of this node's group, with the key from VLLM_API_KEY."""
    key = os.environ.get("VLLM_API_KEY", "")
    return HttpServer(settings["url"], usable_key(key))


def ask_token(
    server: HttpServer,
    listing: HttpAnswer,
    seconds: float = _FIRST_TOKEN,
    tokens: int = 1,
    paths: Iterable[str] = QUESTIONS,
) -> TokenAnswer:
    """Ask the first model of ``listing``, an answer of /v1/models, for some tokens.

    The ``paths`` are tried until the server has one; a model that does not generate is asked for
    an embedding. Return the answer of the first path if the server has none. A request that fails
    is reported in the answer.
    """
    model = listing.value("data", 0, "id")
    if not isinstance(model, str):
        silence = f"/v1/models says {listing.status}, and names no model"
        return TokenAnswer(status=listing.status, trouble=listing.trouble or silence)

    answers: list[HttpAnswer] = []
    for path in paths:
        question = {"model": model, **QUESTIONS[path]}
        if "max_tokens" in question:
            question["max_tokens"] = tokens
        answers.append(server.ask(path, question, seconds))
        if answers[-1].status not in NOT_HERE:
            return read_answer(server, model, answers[-1])
    return read_answer(server, model, answers[0])


def read_answer(server: HttpServer, model: str, answer: HttpAnswer) -> TokenAnswer:
    """Return what came of a question to a model, and why if nothing came."""
    errors = (answer.value(*keys) for keys in _ERRORS)
    error = next(filter(None, errors), "")

    trouble = answer.trouble
    is_empty = not (trouble or error or any(map(answer.value, _ANSWERED)))
    if answer.status == 200 and is_empty:
        trouble = "what came is no answer of the OpenAI API"

    tokens = None
    with suppress(ValueError):
        tokens = whole_number(answer.value("usage", "completion_tokens"), _MOST_TOKENS)

    finish = str(answer.value("choices", 0, "finish_reason") or "")
    return TokenAnswer(
        status=answer.status,
        ms=answer.ms,
        trouble=trouble,
        model=server.clean(model),
        fields=_text_fields(answer),
        tokens=tokens,
        finish=server.clean(finish, 40),
        said=server.clean(error) if isinstance(error, str) else "",
    )


def _text_fields(answer: HttpAnswer) -> tuple[str, ...]:
    """Return the names of the fields that hold text, EMBEDDING if the answer is an embedding."""
    if isinstance(answer.value("data", 0), dict):
        return EMBEDDING

    # A completion has no message: its choice holds the text.
    message = answer.value("choices", 0, "message") or answer.value("choices", 0)
    if not isinstance(message, dict):
        return ()

    texts = {name: text for name, text in message.items() if isinstance(text, str)}
    return tuple(name for name in _TEXTS if texts.get(name))


def watch(settings: Settings, rank: str) -> None:
    """Start a rank on its node and tell systemd; end with 1 when the rank ends or its link is lost.

    At a signal, stops the rank and ends with 0.
    """
    worker = settings["workers"][rank]
    link = None
    try:
        link = _connect(worker, settings)
        notify("READY=1\nSTATUS=")
        say(f"{worker['node']}: rank {rank} is started")
        ending = _follow_link(link)

        # systemd limits the starts in an hour: a lost link of a server that ran does not count.
        served = show_property(settings["unit"], "ActiveState") == "active"
        if ending.lost and served:
            run_tool(*_SYSTEMCTL, "reset-failed", settings["unit"])
        text = f"{worker['node']}: {ending.text}"
        if stop := parse_stop(ending.text):
            text = f"{worker['node']}: {stop.text}"
            write_stop(settings["name"], replace(stop, text=text, time=time.time()))
        leave(1, text)
    except KeyboardInterrupt:
        if link:
            _stop_link(link, worker["node"])


@dataclass(frozen=True)
class LinkEnding:
    """The end of a link: ``lost`` without a word, or by a word of the worker's end.

    ``text`` is that word, or says how the link was lost.
    """

    text: str
    lost: bool


def _follow_link(link: subprocess.Popen[str]) -> LinkEnding:
    """Send signs of life to the worker and read the worker's, until the rank ends or is silent."""
    assert link.stdout
    sign_at = time.monotonic()
    last_line = ""

    while True:
        _send_sign(link)
        readable, _, _ = select.select([link.stdout], [], [], HEARTBEAT)
        if readable:
            sign_at = time.monotonic()
            line = link.stdout.readline()
            if not line:
                text = f"the link is lost: {last_line}".removesuffix(": ")
                return LinkEnding(text, lost=True)
            if word := read_rank_word(line):
                return LinkEnding(word, lost=False)
            last_line = line.strip() or last_line
        elif time.monotonic() - sign_at > SILENCE:
            link.kill()
            return LinkEnding(f"no sign of life for {SILENCE:.0f} s", lost=True)


def _send_sign(link: subprocess.Popen[str]) -> None:
    """Send a sign of life to the worker; that a link is lost is told by its output."""
    assert link.stdin
    with suppress(BrokenPipeError):
        link.stdin.write("\n")
        link.stdin.flush()


def _stop_link(link: subprocess.Popen[str], node: str) -> None:
    """Tell the worker to stop its rank, and say whether it did."""
    # The node's systemd kills a rank that does not end within TimeoutStopSec.
    with suppress(subprocess.TimeoutExpired):
        link.communicate("stop\n", timeout=60)
    link.kill()

    ending = f"did not say that it stopped; it stops within {SILENCE:.0f} s of silence"
    if link.returncode == 0:
        ending = "stopped"
    say(f"{node}: {ending}")


def _connect(worker: Settings, settings: Settings) -> subprocess.Popen[str]:
    """Return the link to a worker once its rank is started; try again while that fails.

    A refused login or a node that just boots is tried again. Ends with 1 if the worker's end of the
    link says that its rank cannot start.
    """
    last_reason = ""
    missing = read_missing()
    while True:
        link = subprocess.Popen(
            worker_words(worker, settings, "group.py hold", missing),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a signal to this process does not reach ssh
        )

        last_line = _await_rank(link, worker["node"])
        if not last_line:
            return link

        link.wait()
        reason = f"waiting for {worker['node']}: {last_line}"
        if reason != last_reason:
            say(reason)
            notify(f"STATUS={reason}")
            last_reason = reason
        time.sleep(_AGAIN)


def _await_rank(link: subprocess.Popen[str], node: str) -> str:
    """Wait until a worker's rank is started; return the last line of a link that ended before.

    Returns "" for a rank that is started. Tells systemd meanwhile what it waits for.
    """
    assert link.stdout
    last_line = "no answer"
    for line in link.stdout:
        _send_sign(link)
        word = read_rank_word(line)
        if word == _STARTED:
            return ""

        text = word.removeprefix(_WAITS)
        if text != word:
            notify(f"STATUS={node}: {clean_text(text)}")
        elif word:
            leave(1, f"error: {node}: {word}")
        last_line = text or line.strip() or last_line
    return last_line


def say_rank_word(text: str) -> None:
    """Write a word from the worker's end of the link to the head's end."""
    # The line break comes first: a login may have printed a line without one.
    say(f"\n{_RANK_WORD}{text}")


def read_rank_word(line: str) -> str:
    """Return the word from the worker's end of the link in a line, "" for any other line."""
    return line.strip().partition(_RANK_WORD)[2]


def leave_link(text: str) -> NoReturn:
    """Tell the head's end of the link why this end stops, and end with 1."""
    say_rank_word(text)
    sys.exit(1)


def worker_words(
    worker: Settings, settings: Settings, script: str, *more: object
) -> list[str]:
    """Return the words of ssh that run a verb of a script on a worker.

    ``script`` is "FILE VERB"; the verb gets the id of this start, and ``more``.
    """
    # The path begins at the home: a command by ssh runs there.
    path = f".config/patchkit/{settings['name']}/{script}"
    words = ("exec python3", ALONE, path, settings["id"], *more)
    return [*worker["ssh"], " ".join(map(str, words))]


def notify(state: str, *files: int) -> None:
    """Tell systemd the state of this unit, as sd_notify(3) says; do nothing outside of a unit.

    It gets open ``files`` to keep.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        connection.connect(address)
        socket.send_fds(connection, [state.encode()], files)


def enter_start(settings: Settings, group: str) -> None:
    """Make systemctl --user usable over ssh; end with 1 if this node's files are of another start.

    ``group`` is the id of the start that the head runs.
    """
    os.environ.setdefault("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    if settings["id"] != group:
        leave_link("its files are of another start: run `patchkit up` again")


def hold(settings: Settings, group: str, missing: str) -> NoReturn:
    """Replace this process by a unit that runs `held`, and that the rank's unit needs.

    However that unit ends, systemd then stops the rank. The rank's cache is to be ``missing`` GiB
    smaller than planned.
    """
    enter_start(settings, group)
    if trouble := keep_cache(settings, float(missing)):
        say(f"the cache is not {missing} GiB smaller: {trouble}")
    rank = settings["unit"]
    unit = rank.replace(".service", "-hold.service")
    run_tool(*_SYSTEMCTL, "stop", unit, rank)  # left from a lost link

    words = ["systemd-run", "--user", "--quiet", "--pipe", "--collect"]
    words += [f"--unit={unit}", f"--property=Wants={rank}"]
    words.append("--property=OOMScoreAdjust=-900")  # as of the units beside the head's
    words += [sys.executable, ALONE, __file__, "held"]
    os.execvp(words[0], words)  # noqa: S606


def held(settings: Settings) -> None:
    """Start this node's rank; stop it when the head says so, is gone or is silent."""
    began = time.time()
    unit = settings["unit"]
    ending = "gone"
    with suppress(KeyboardInterrupt, BrokenPipeError):
        ending = _run_rank(unit)

    run_tool(*_SYSTEMCTL, "stop", unit)  # a start that still waits as well

    stop = read_stop(settings["name"], settings["id"])
    if stop and stop.time >= began:
        leave_link(encode_stop(stop).decode())

    # A node that shuts down ends the rank: that is no fault of the rank.
    if ending == "ended" and not _is_shutting_down():
        leave_link(f"the rank ended: {_describe_ending(unit)}")
    sys.exit(0 if ending == "asked" else 1)


def _run_rank(unit: str) -> str:
    """Start this node's rank, and return why to stop it, as ``_await_end`` does."""
    start = subprocess.Popen(
        (*_SYSTEMCTL, "start", unit),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    guard = unit.replace(".service", "-memory.service")
    ending = _await_end(os.pidfd_open(start.pid), guard)
    if ending != "ended":
        return ending

    _output, trouble = start.communicate()
    if start.returncode:
        leave_link(f"{unit} does not start: {trouble.strip()}")
    process = int(show_property(unit, "MainPID") or 0)
    try:
        rank = os.pidfd_open(process)
    except (OSError, ValueError):
        leave_link(f"{unit} ended at once: {_describe_ending(unit)}")

    say_rank_word(_STARTED)
    return _await_end(rank)


def _await_end(process: int, guard: str = "") -> str:
    """Wait, and return why to stop: the process "ended", the head "asked" for it or is "gone".

    ``process`` is a descriptor (pidfd) of the rank, or of its start, which waits for the unit
    ``guard``; standard input is the link.
    """
    sign_at = time.monotonic()
    beat_at = sign_at
    while True:
        readable, _, _ = select.select([0, process], [], [], HEARTBEAT)
        now = time.monotonic()
        if process in readable:
            return "ended"
        if 0 in readable:
            data = os.read(0, 4096)
            if b"stop" in data:
                return "asked"
            if not data:
                return "gone"
            sign_at = now
        elif now - sign_at > SILENCE:
            return "gone"

        if now - beat_at >= HEARTBEAT:
            beat_at = now
            say("")  # a sign of life for the head
            if guard:
                text = show_property(guard, "StatusText")
                say_rank_word(f"{_WAITS}{text or 'the rank starts'}")


def _is_shutting_down() -> bool:
    """Return whether the user's systemd stops all units, or is gone."""
    state = run_tool(*_SYSTEMCTL, "is-system-running").stdout.strip()
    return state in ("stopping", "offline", "unknown", "")


def _describe_ending(unit: str) -> str:
    """Return how a unit ended, in systemd's words."""
    result = show_property(unit, "Result")
    status = show_property(unit, "ExecMainStatus")
    return f"{result}, status {status}"


def show_property(unit: str, name: str) -> str:
    """Return systemd's value of a unit's property, "" if there is none."""
    words = ("show", f"--property={name}", "--value", unit)
    return run_tool(*_SYSTEMCTL, *words).stdout.strip()


if __name__ == "__main__":
    main(begin, ready, ended, spread, watch, hold, held)
