"""Start, ask and stop the process that measures."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from patchkit.errors import HostError, SourceError

_SCRIPT = Path(__file__).with_name("benchmark.py")
_START = 60.0  # seconds; looking for two packages takes a fraction of one
_HINTS = {
    "gpu": "run it on the machine that will serve, with its driver and devices visible",
    "vllm": "name the Python that has vLLM with --python, for example venv/bin/python",
}


class StalledError(Exception):
    """No answer within the time that was left."""


class Measuring:
    """The process that measures: a line of JSON for each request, a line for its answer."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str]) -> None:
        self._process = process
        self._log = log
        self._answers: queue.Queue[str] = queue.Queue()
        # A pipe cannot be read with a time limit, a queue can.
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Return the answer. Raises StalledError, HostError; SourceError for an unfit release."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self.answer(timeout)

    def answer(self, timeout: float) -> dict[str, Any]:
        """Return the next answer. Raises as ``ask``."""
        try:
            line = self._answers.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            raise StalledError from None
        if not line:
            raise HostError(
                f"the measuring process ended: {self._last_words()}",
                why="it ran out of memory, or vLLM and the driver do not fit together",
                hint="run a model with this Python first; patchkit tune needs a working vLLM",
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            kind = SourceError if answer["kind"] == "release" else HostError
            raise kind(answer["error"], hint=_HINTS.get(answer["kind"], ""))
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _last_words(self) -> str:
        code = self._process.wait(timeout=30)
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return f"exit code {code}" + (f", after {lines[-1]!r}" if lines else "")


@contextlib.contextmanager
def measuring(python: str) -> Iterator[Measuring]:
    """Run the script with ``python``; it is killed at the end, whatever it is doing.

    Raises HostError if that Python has no torch or no vLLM, before anything else is done.
    """
    # Not a pipe: nobody empties it meanwhile, and a full one would stop the process.
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            process = subprocess.Popen(
                [python, str(_SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        except OSError as error:
            raise HostError(f"{python}: {error.strerror}", hint=_HINTS["vllm"]) from None
        try:
            running = Measuring(process, log)
            try:
                running.answer(_START)
            except StalledError:
                raise HostError(f"{python} did not start within {_START:.0f} s") from None
            yield running
        finally:
            process.kill()
            process.wait()
