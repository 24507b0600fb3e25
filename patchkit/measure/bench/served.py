"""Serve one variant for the time of a measurement; nothing of it is left afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchkit.cluster.openai.chat_stream import ask_anyhow
from patchkit.cluster.openai.http_exchange import HttpServer
from patchkit.doctor.symptoms.diagnosis import read_log
from patchkit.errors import HostError
from patchkit.quoting import quoted
from patchkit.reading import read_chunks

_TOKEN = 600.0  # seconds for the first token: Triton compiles then
_END = 30.0  # seconds for a server to end by itself
# Told to every server: nothing is reported to anybody, and no line of the log is held back.
_QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVariant:
    """A server that has answered: where, as what, and after how many seconds."""

    url: str
    model: str
    load_s: float
    token_s: float


@contextlib.contextmanager
def served(
    words: Sequence[str | Path],
    variables: Mapping[str, str],
    log: Path,
    patience: float,
    tell: Callable[[float], None],
) -> Iterator[ServedVariant]:
    """Start a server on a free port of this machine alone, and end all its processes.

    ``words`` are without --host and --port. ``tell`` gets the seconds so far. Raises HostError with
    what its log says if it does not answer within ``patience`` seconds.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [*map(str, words), "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as file:
        try:
            process = subprocess.Popen(
                command,
                env={**os.environ, **_QUIET, **variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # a group of its own, which ends as a whole
            )
        except OSError as error:
            raise HostError(f"{words[0]}: {error.strerror}", hint="--venv DIR") from None
    try:
        yield _answered(process, url, log, patience, tell)
    finally:
        _end(process)


def _answered(
    process: subprocess.Popen[bytes],
    url: str,
    log: Path,
    patience: float,
    tell: Callable[[float], None],
) -> ServedVariant:
    server, began = HttpServer(url), time.monotonic()
    while (seconds := time.monotonic() - began) < patience:
        if (status := process.poll()) is not None:
            raise _failed(log, f"the server ended with exit code {status}")
        tell(seconds)
        listing = server.ask("/v1/models")
        if listing.status == 200:
            model = str(listing.json["data"][0]["id"])
            answer = ask_anyhow(server, model, "Hello", 1, _TOKEN)
            if answer.first_ms is None and answer.completion_tokens in (None, 0):
                raise _failed(log, f"the server gave no token: {answer.said or answer.trouble}")
            token = time.monotonic() - began - seconds
            return ServedVariant(url=url, model=model, load_s=seconds, token_s=token)
        time.sleep(1)
    raise _failed(log, f"the server did not answer within {patience:.0f} s")


def _failed(log: Path, what: str) -> HostError:
    """Return the error, with the cause that its log decides."""
    known = read_log(read_chunks(log)).first
    if known and known.decided and not known.symptom.follows:
        (cause,) = known.causes
        what = f"{what}: {known.hit.text.strip()}"
        cure = " ".join(filter(None, (known.filled(cause.cure), known.pasted(cause.command))))
        return HostError(what, why=known.filled(cause.cause), hint=cure)
    return HostError(what, hint=quoted("patchkit", "doctor", "--log", log))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and all that it started, by itself if it does so in time."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_END)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
