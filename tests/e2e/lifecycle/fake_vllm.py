"""A `vllm` that computes nothing, and starts, hangs, dies and lies as the real one was measured to.

`vllm serve MODEL …` has one main process and one worker process per rank, as with vLLM's own
``--nnodes``. Ranks wait for each other at ``--master-addr``. Afterwards nobody watches anybody:

- a worker process whose head is gone waits on for ever, and so does the main process of its rank;
- a head whose worker is gone answers 500 to the next request, and exits 2 s later;
- a headless rank whose worker process dies exits 2 s later, with status 0;
- a peer that says nothing, as behind a pulled cable, is waited for.

It needs the standard library alone. Variables of the environment decide more, and before them those
in `fake.env` of the model's folder, which is read at every start: FAKE_LOAD (seconds),
FAKE_LIE (seconds that /health says 200 before anything is answered), FAKE_FAIL (an error while
loading, of rank FAKE_FAIL_RANK, with models whose path ends with FAKE_FAIL_MODEL), FAKE_STATS (0:
no counters in /metrics), FAKE_METRICS (seconds that /metrics takes), FAKE_STALL (1: requests come
to wait, and none is ever scheduled), FAKE_WEIGHTS (MiB that a rank takes while it loads, with
``--kv-cache-memory-bytes`` on top, in no process's RSS, as a GPU's on a GB10), FAKE_STORM (1: the
worker process waits for a file `storm` in the model's folder, and takes memory as it says: words of
e2e/proofs/hog.py, after its path, after ``once`` or ``again``; the file goes away unless it is
``again``). A question may say more: ``steps``, each of so many ``seconds``, that are ``prefill``:
then they fill the cache and count nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

VERSION = "0.25.1"
WORKER = "VLLM::Worker_TP"
DYING_SECONDS = 2.0
PATIENCE_SECONDS = 300  # for a silent peer
DEFAULTS = {
    "LOAD": "2",
    "LIE": "0",
    "FAIL": "",
    "FAIL_RANK": "0",
    "FAIL_MODEL": "",
    "STATS": "1",
    "METRICS": "0",
    "STALL": "0",
    "WEIGHTS": "0",
    "STORM": "",
}


def setting(name: str, model: str) -> str:
    """Return a setting: of the model's file, of a variable, or its default."""
    file = Path(model, "fake.env")
    lines = file.read_text().splitlines() if file.is_file() else []
    known = dict(line.split("=", 1) for line in lines if "=" in line)
    return known.get(f"FAKE_{name}") or os.environ.get(f"FAKE_{name}") or DEFAULTS[name]


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the flags that matter here; all others are let pass."""
    parser = argparse.ArgumentParser(prog="vllm", allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--master-port", type=int, default=29501)
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--host", default="")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", nargs="+", default=[])
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=0)
    known, _ = parser.parse_known_args(arguments)
    return known


def log(text: str, *, level: str = "INFO", where: str = "core.py:93") -> None:
    stamp = time.strftime("%m-%d %H:%M:%S")
    print(
        f"(EngineCore_DP0 pid={os.getpid()}) {level} {stamp} [{where}] {text}",
        flush=True,
    )


def fail(error: str) -> NoReturn:
    """Print an error as vLLM's engine does, and end."""
    source = (
        'File "/site-packages/vllm/v1/engine/core.py", line 997, in run_engine_core'
    )
    for line in (
        "EngineCore failed to start.",
        "Traceback (most recent call last):",
        f"  {source}",
        "    engine_core = EngineCoreProc(*args, engine_index=dp_rank, **kwargs)",
        error,
    ):
        log(line, level="ERROR", where="core.py:1006")
    os._exit(1)


# What `up` asks a model at its first answer, so that it finds nothing to say.
_KNOWLEDGE = "Paris Friday 10 June Deutschland cold G 8 48213 70956"


class FakeRank:
    """The main process of a rank; ``peers`` are the lines to the worker processes that it asks."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.head = not given.node_rank
        self.peers: list[socket.socket] = []
        self.turn = threading.Lock()  # one request at a time
        self.dead = threading.Event()
        self.counts = dict.fromkeys(
            ("iteration_tokens_total_count", "generation_tokens_total"), 0
        )
        # Gauges are as of the last step: of a request that waits for the first one nothing is seen.
        self.counts |= {"num_requests_running": 0, "num_requests_waiting": 0}
        self.cache = 0.0

    def load(self) -> None:
        """Meet the other ranks, start the worker process, and load; ends the process on errors."""
        given = self.given
        log(
            f"Initializing a V1 LLM engine (v{VERSION}) with config: model={given.model!r}"
        )
        if given.model.startswith("/") and not Path(given.model).is_dir():
            fail(f"OSError: Can't load the configuration of '{given.model}'.")
        for name, place in (
            ("graphs", "VLLM_CACHE_ROOT"),
            ("kernels", "TRITON_CACHE_DIR"),
        ):
            if folder := os.environ.get(place):
                code = Path(folder, "inductor_cache", f"{name}-of-{given.node_rank}")
                log(
                    f"{name} {'found' if code.exists() else 'compiled'}",
                    where="caching.py:1",
                )
                if not code.exists():
                    code.parent.mkdir(parents=True, exist_ok=True)
                    code.touch()
        own, line = socket.socketpair()
        if self.head:
            self.peers = [own, *self._gather_ranks()]
        else:
            line = self._join_head()
        own_words = (
            f"{WORKER}{given.node_rank}",
            line.fileno(),
            given.node_rank,
            given.model,
            given.kv_cache_memory_bytes,
        )
        # -P: its own folder may be a package, whose modules are nobody's.
        words = [sys.executable, "-P", __file__, *map(str, own_words)]
        self.worker = subprocess.Popen(
            words, pass_fds=[line.fileno()], stdin=subprocess.DEVNULL
        )
        line.close()
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        threading.Thread(target=self._watch, daemon=True).start()
        for (
            peer
        ) in self.peers:  # the ranks load together: here it is noticed if one is lost
            if read_line(peer) != b"ready\n":
                fail(
                    "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer"
                )
        if self.head:
            log(
                "init engine (profile, create kv cache, warmup model) took 1.00 seconds"
            )

    def run(self, steps: int = 1, seconds: float = 0, prefill: bool = False) -> bool:
        """Do the steps of a request, one after the other. False if a rank is gone."""
        if setting("STALL", self.given.model) == "1":
            self.counts["num_requests_waiting"] += 1
            self.dead.wait()
        return all(
            self._step(seconds, prefill, left) for left in reversed(range(steps))
        )

    def _step(self, seconds: float, prefill: bool, left: int) -> bool:
        """Let all worker processes do one step. False if one is gone, as of which all is over."""
        with self.turn:
            try:
                for peer in self.peers:
                    peer.settimeout(PATIENCE_SECONDS)
                    peer.sendall(f"step {seconds}\n".encode())
                if all(read_line(peer) == b"done\n" for peer in self.peers):
                    for name in () if prefill else [*self.counts][:2]:
                        self.counts[name] += 1
                    self.counts["num_requests_running"] = int(left > 0)
                    self.cache = (self.cache + 0.01) % 1 if left else 0.0
                    return True
            except OSError as error:
                log(f"RPC call to execute_model failed: {error}", level="ERROR")
        log("EngineDeadError: EngineCore encountered an issue.", level="ERROR")
        self._die(1)
        return False

    def _die(self, status: int) -> None:
        """End in a moment, with the worker process."""
        if not self.dead.is_set():
            self.dead.set()
            threading.Timer(DYING_SECONDS, self._end, [status]).start()

    def _gather_ranks(self) -> list[socket.socket]:
        given = self.given
        found: dict[str, socket.socket] = {}
        if given.nnodes == 1:
            return []
        try:
            # It listens as long as the rank lives, as torch's store does.
            self.store = socket.create_server((given.master_addr, given.master_port))
        except OSError as error:
            fail(
                f"torch.distributed.DistNetworkError: {error}. port: {given.master_port}"
            )
        while len(found) < given.nnodes - 1:
            log(
                f"waiting for {given.nnodes - 1 - len(found)} more ranks",
                where="parallel.py:1",
            )
            peer, _ = self.store.accept()
            rank, _, model = read_line(peer).decode().strip().partition(" ")
            if model != given.model:
                fail(f"RuntimeError: rank {rank} has another model: {model}")
            found[rank] = peer
        for peer in found.values():
            peer.sendall(b"go\n")
        return list(found.values())

    def _join_head(self) -> socket.socket:
        given = self.given
        while True:
            try:
                store = socket.create_connection(
                    (given.master_addr, given.master_port), 5
                )
                store.settimeout(None)
                store.sendall(f"{given.node_rank} {given.model}\n".encode())
                if read_line(store) == b"go\n":
                    return store
            except OSError as error:
                log(f"client socket has failed to connect: {error}", level="WARNING")
            time.sleep(0.5)

    def _watch(self) -> None:
        status = self.worker.wait()
        if not self.dead.is_set():
            log("Worker proc died unexpectedly, shutting down executor.", level="ERROR")
            if status == 1:  # it has said why
                os._exit(1)
            self._die(0 if self.given.headless else 1)

    def _stop(self, *_signal: object) -> None:
        log("Shutting down", where="launcher.py:1")
        self._end(0)

    def _end(self, status: int) -> None:
        self.dead.set()
        self.worker.kill()
        os._exit(status)


def read_line(peer: socket.socket) -> bytes:
    """Read to the end of a line, or of the connection."""
    text = b""
    while not text.endswith(b"\n") and (more := peer.recv(1)):
        text += more
    return text


class FakeApi(BaseHTTPRequestHandler):
    """What vLLM's OpenAI server answers, as far as launchers ask."""

    rank: FakeRank
    honest_from = 0.0  # on the monotonic clock
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        """Answer until the other end goes away, of which uvicorn says nothing either."""
        with contextlib.suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        names = self.rank.given.served_model_name or [self.rank.given.model]
        answers = {
            "/health": None,
            "/version": {"version": VERSION},
            "/v1/models": {
                "object": "list",
                "data": [{"id": name, "object": "model"} for name in names],
            },
        }
        if self.path == "/metrics":
            time.sleep(float(setting("METRICS", self.rank.given.model)))
            counts = {**self.rank.counts, "kv_cache_usage_perc": self.rank.cache}
            labels = f'{{engine="0",model_name="{names[0]}"}}'
            model = self.rank.given.model
            lines = (
                f"vllm:{name}{labels} {float(value)}\n"
                for name, value in counts.items()
            )
            self._send(
                200, "".join(lines) if setting("STATS", model) == "1" else "# nothing\n"
            )
            return
        dead = self.path == "/health" and self.rank.dead.is_set()
        known = self.path in answers
        self._send(503 if dead else 200 if known else 404, answers.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            self._send(404, {"error": {"message": "Not Found"}})
            return
        time.sleep(max(0.0, self.honest_from - time.monotonic()))
        if not self.rank.run(**body.get("fake", {})):
            self._send(500, {"error": {"message": "EngineCore encountered an issue."}})
            return
        if "tools" in body:
            self._send(400, {"error": {"message": "--tool-call-parser is missing"}})
            return
        stream = bool(body.get("stream"))
        text = "".join(
            f"word{number} " for number in range(body.get("max_tokens") or 16)
        )
        text += _KNOWLEDGE
        message = {
            "delta" if stream else "message": {"role": "assistant", "content": text}
        }
        choice = {"index": 0, "text": text, **message, "finish_reason": "length"}
        self._send(200, {"id": "cmpl-1", "choices": [choice]}, stream=stream)

    def _send(self, status: int, answer: object, *, stream: bool = False) -> None:
        plain = answer if isinstance(answer, str) else json.dumps(answer)
        text = "" if answer is None else plain
        data = (f"data: {text}\n\ndata: [DONE]\n\n" if stream else text).encode()
        self.send_response(status)
        self.send_header(
            "Content-Type", "text/event-stream" if stream else "application/json"
        )
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *values: Any) -> None:
        """Print it as uvicorn does, to standard output."""
        said = f"{self.address_string()} - {format % values}"
        print(f"(APIServer pid={os.getpid()}) INFO: {said}", flush=True)


def serve(rank: FakeRank) -> None:
    """Answer requests until the end."""
    FakeApi.rank = rank
    FakeApi.honest_from = time.monotonic() + float(setting("LIE", rank.given.model))
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer.allow_reuse_port = True  # as vLLM's create_server_socket does
    try:
        server = ThreadingHTTPServer((rank.given.host, rank.given.port), FakeApi)
    except OSError as error:
        log(
            f"{error}: {rank.given.host}:{rank.given.port}",
            level="ERROR",
            where="launcher.py:2",
        )
        rank.worker.kill()
        os._exit(1)
    log("Application startup complete.", where="launcher.py:3")
    server.serve_forever()


def take_memory(size: int, seconds: float) -> None:
    """Take memory that is in no process's RSS and goes with this process, in so much time."""
    memory = os.memfd_create("device")
    for _ in range(size >> 20):
        os.write(memory, b"\1" * (1 << 20))
        time.sleep(seconds / (size >> 20))


def wait_for_storm(model: str) -> None:
    """Take memory as the model's file `storm` says, as soon as there is one."""
    file = Path(model, "storm")
    while not file.is_file() or not (text := file.read_text()):
        time.sleep(0.1)
    again, program, *words = text.split()
    if again != "again":
        file.unlink()
    runpy.run_path(program)["take"](*words)


def work(number: int, rank: str, model: str, cache: str) -> None:
    """Load, then do steps; if nobody asks any more, wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log("Starting to load model", where="gpu_model_runner.py:2602")
    if setting("STORM", model) == "1":
        threading.Thread(target=wait_for_storm, args=[model], daemon=True).start()
    if size := (int(setting("WEIGHTS", model)) << 20) + int(cache):
        take_memory(size, float(setting("LOAD", model)))
    else:
        time.sleep(float(setting("LOAD", model)))
    chosen = setting("FAIL_RANK", model) == rank and model.endswith(
        setting("FAIL_MODEL", model)
    )
    if chosen and (error := setting("FAIL", model)):
        fail(error)
    line = socket.socket(fileno=number)
    answer = b"ready\n"
    try:
        while answer:
            line.sendall(answer)
            orders = line.recv(100).decode().splitlines()
            time.sleep(sum(float(order.partition(" ")[2]) for order in orders))
            answer = b"done\n" * len(orders)
    except OSError as error:
        log(f"connection lost, which nobody looks at: {error}", level="WARNING")
    while True:
        signal.pause()


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--version"]:
        print(VERSION)
    elif arguments and arguments[0].startswith(WORKER):
        work(int(arguments[1]), *arguments[2:5])
    else:
        rank = FakeRank(options(arguments))
        rank.load()
        if rank.head:
            serve(rank)
        while True:
            signal.pause()


if __name__ == "__main__":
    main()
