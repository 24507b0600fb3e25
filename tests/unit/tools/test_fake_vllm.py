"""The fake vLLM of `nox -s lifecycle`, on this machine: it has to fail as the real one does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / "tests" / "e2e" / "lifecycle" / "fake_vllm.py"
SECONDS = 30


class FakePair:
    """Two ranks, whose processes all end with the test."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.ports = [_free_port(), _free_port()]
        env = {**os.environ, "FAKE_LOAD": "0.1", "FAKE_MB": "1", **settings}
        flags = ["--nnodes", "2", "--master-port", str(self.ports[0]), "--enforce-eager"]
        listen = ["--host", "127.0.0.1", "--port", str(self.ports[1])]
        self.outputs = [folder / "0", folder / "1"]
        self.ranks = []
        for number, more in enumerate((listen, ["--headless"])):
            rank = ["serve", "tiny", *flags, "--node-rank", str(number), *more]
            with self.outputs[number].open("wb") as output:
                words = [sys.executable, PROGRAM, *rank]
                started = subprocess.Popen(words, env=env, stdout=output, start_new_session=True)
            self.ranks.append(started)

    def ask(self, path: str, **body: object) -> str:
        url = f"http://127.0.0.1:{self.ports[1]}{path}"
        data = json.dumps(body).encode() if body else None
        with urllib.request.urlopen(url, data, timeout=SECONDS) as answer:
            return answer.read().decode()

    def healthy(self) -> None:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and self.ranks[0].poll() is None:
            try:
                self.ask("/health")
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise AssertionError(self.outputs[0].read_text())

    def worker(self, rank: int) -> int:
        pid = self.ranks[rank].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    def end(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):  # all of a rank may have ended
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def pair(tmp_path, request):
    found = FakePair(tmp_path, **getattr(request, "param", {}))
    yield found
    found.end()


def test_answers_as_a_whole_and_in_pieces(pair):
    pair.healthy()
    assert json.loads(pair.ask("/v1/models"))["data"][0]["id"] == "tiny"
    whole = json.loads(pair.ask("/v1/completions", model="tiny", prompt="a", max_tokens=2))
    assert whole["choices"][0]["text"] == "word0 word1 "
    pieces = pair.ask("/v1/chat/completions", messages=[], max_tokens=2, stream=True).split("\n\n")
    first = json.loads(pieces[0].removeprefix("data: "))
    assert first["choices"][0]["delta"]["content"] == "word0 "
    assert pieces[-2:] == ["data: [DONE]", ""]


def test_a_dead_worker_is_noticed_by_the_next_request_alone(pair):
    pair.healthy()
    os.kill(pair.worker(1), signal.SIGKILL)
    assert pair.ranks[1].wait(SECONDS) == 0  # as a headless rank of vLLM's
    pair.ask("/health")
    with pytest.raises(urllib.error.HTTPError, match="500"):
        pair.ask("/v1/completions", model="tiny", prompt="a")
    assert pair.ranks[0].wait(SECONDS) == 1


def test_a_dead_head_is_noticed_by_nobody(pair):
    pair.healthy()
    os.killpg(pair.ranks[0].pid, signal.SIGKILL)
    with pytest.raises(subprocess.TimeoutExpired):
        pair.ranks[1].wait(3)
    os.kill(pair.worker(1), 0)


@pytest.mark.parametrize(
    "pair", [{"FAKE_FAIL": "CUDA error: out of memory", "FAKE_FAIL_RANK": "1"}], indirect=True
)
def test_the_rank_that_fails_says_why_and_the_other_one_what_followed(pair):
    assert [rank.wait(SECONDS) for rank in pair.ranks] == [1, 1]
    head, worker = (output.read_text() for output in pair.outputs)
    assert "CUDA error: out of memory" in worker
    assert "CUDA error" not in head
    assert "Connection closed by peer" in head
