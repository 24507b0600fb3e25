"""Start a real server process, take its first token, and leave nothing of it."""

import os
import sys
import time
from pathlib import Path

import pytest

from patchkit.errors import HostError
from patchkit.measure.bench.served import served

TESTS = Path(__file__).parents[3]
SERVER = f"""
import sys, subprocess, time
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]
from support.model_server import ModelServer
import http.server, socketserver
port = int(sys.argv[sys.argv.index("--port") + 1])
child = subprocess.Popen(["sleep", "300"])
print("child", child.pid, flush=True)
socketserver.TCPServer.allow_reuse_address = True
bind = http.server.ThreadingHTTPServer.server_bind
def here(self):
    self.server_address = ("127.0.0.1", port)
    bind(self)
http.server.ThreadingHTTPServer.server_bind = here
with ModelServer():
    time.sleep(300)
"""


def running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_server_answers_and_all_its_processes_end(tmp_path):
    log = tmp_path / "log" / "a-1.log"
    with served([sys.executable, "-c", SERVER], {"A": "b"}, log, 60, lambda _: None) as found:
        assert found.model
        assert found.url.startswith("http://127.0.0.1:")
        child = int(log.read_text().split()[1])
        assert running(child)
    deadline = time.monotonic() + 10
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(child)


@pytest.mark.parametrize(
    ("code", "what", "why"),
    [
        ("raise SystemExit('Python.h: No such file or directory')", "Python.h", "Triton compiles"),
        ("raise SystemExit(3)", "exit code 3", ""),
    ],
)
def test_a_server_that_ends_says_why(tmp_path, code, what, why):
    with (
        pytest.raises(HostError, match=what) as raised,
        served([sys.executable, "-c", code], {}, tmp_path / "log", 60, lambda _: None),
    ):
        pass
    assert why in raised.value.why
    assert os.fspath(tmp_path / "log") in raised.value.hint or why


def test_a_program_that_is_not_there(tmp_path):
    with (
        pytest.raises(HostError, match="No such file"),
        served(["/nowhere/python"], {}, tmp_path / "log", 5, lambda _: None),
    ):
        pass
