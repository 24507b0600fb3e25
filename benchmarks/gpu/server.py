"""A ``vllm serve`` of one's own on the loopback: started, watched, asked and always ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

# A proxy of the environment is not for the loopback.
OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
REQUEST = 300  # seconds; the first ones wait for Triton's compiler
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",  # compiles every shape that might come
    "PYTHONUNBUFFERED": "1",
}

# The end of a traceback, behind a process's name and perhaps the logger's prefix.
RAISED = re.compile(
    r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception): .*)"
)


class Server:
    """One server in a session of its own; leaving the ``with`` ends all of its processes."""

    def __init__(self, arguments: list[str], log: Path, patience: float) -> None:
        self.arguments, self.log, self.patience = arguments, log, patience
        self.address = f"http://127.0.0.1:{free_port()}"
        self.started = 0.0  # seconds until it answered
        self.members: list[int] = []  # its processes, once it is being ended

    def __enter__(self) -> Self:
        port = self.address.rpartition(":")[2]
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            *self.arguments,
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", port],
                env={**os.environ, **QUIET},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self) -> None:
        """Until /health answers; RuntimeError if the server ends or takes too long."""
        start = time.monotonic()
        while (spent := time.monotonic() - start) < self.patience:
            if (code := self.process.poll()) is not None:
                raise RuntimeError(f"the server ended with {code}: {self.last_words()}")
            with (
                contextlib.suppress(OSError),
                OPEN(f"{self.address}/health", timeout=5),
            ):
                self.started = round(spent, 1)
                return
            time.sleep(0.5)
        raise RuntimeError(f"no answer in {self.patience:.0f} s: {self.last_words()}")

    def stop(self) -> None:
        """Ask, then kill: the group, and whoever left it."""
        self.members = family(self.process.pid)
        end(self.members, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        end(self.members, signal.SIGKILL)
        self.process.wait()

    def survivors(self) -> list[int]:
        """Processes of a server that has ended which have not, a moment later."""
        for _ in range(20):
            alive = {pid for pid, _ in parentage()} & {*self.members}
            if not alive:
                break
            time.sleep(0.25)
        return sorted(alive)

    def engine_libraries(self) -> dict[int, list[str]]:
        """Process id -> the shared libraries that it maps, for processes named EngineCore."""
        return {
            pid: mapped(pid)
            for pid in family(self.process.pid)
            if "EngineCore" in command_line(pid)
        }

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """JSON of one request; RuntimeError with the server's words if it refuses."""
        with self.opened(path, body) as answer:
            return json.load(answer)

    def text(self, path: str) -> str:
        """The body of a GET as text."""
        with self.opened(path, None) as answer:
            return answer.read().decode()

    def events(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        """JSON of each server-sent event, without the closing [DONE]."""
        with self.opened(path, body) as answer:
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    yield json.loads(data)

    def opened(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.address + path, data, headers)  # noqa: S310 - http
        try:
            return OPEN(request, timeout=REQUEST)
        except urllib.error.HTTPError as error:
            raise RuntimeError(
                f"{path}: {error.code} {error.read().decode()[:300]}"
            ) from error

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by name, summed over their labels."""
        sums: dict[str, float] = {}
        for line in self.text("/metrics").splitlines():
            if match := re.match(r"([a-z_:]+)(?:\{.*\})? (\S+)$", line):
                sums[match[1]] = sums.get(match[1], 0.0) + float(match[2])
        return sums

    def last_words(self) -> str:
        """The first exception in the log, else its last line."""
        lines = [
            line
            for line in self.log.read_text(errors="replace").splitlines()
            if line.strip()
        ]
        # Later ones ("engine core initialization failed") are consequences.
        raised = [match[1] for line in lines if (match := RAISED.match(line))]
        return (raised[:1] or lines[-1:] or ["nothing"])[0][-300:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def family(pid: int) -> list[int]:
    """A process and all of its descendants that are alive."""
    parents, found = dict(parentage()), [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return [member for member in found if member in parents]


def end(processes: list[int], number: int) -> None:
    """Signal each one that is still there."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def parentage() -> Iterator[tuple[int, int]]:
    """Each process and its parent, from /proc."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                yield int(stat.parent.name), int(fields[1])


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def mapped(pid: int) -> list[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[5:] for line in lines)
    return sorted({path[0] for path in paths if path and ".so" in path[0]})
