"""Check what proves that a server lives, and what the copied script does by itself."""

import http.server
import json
import shutil
import subprocess
import sys
import threading
import time

import pytest

from patchkit.cluster.agent.alive_script import Liveness
from support.clusters import cluster, node_facts, units_of
from support.local_server import LocalServer

IDLE = 'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_running{engine="1"} 0.0\n'
BUSY = IDLE.replace(" 0.0", " 1.0")
CACHE = 'vllm:kv_cache_usage_perc{engine="0",model_name="a } b"} '
SLEEPS = 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n'


class Api(http.server.BaseHTTPRequestHandler):
    """`/metrics` gives the texts one after the other; a token comes once it may."""

    def do_GET(self):
        known = {"/v1/models": {"data": [{"id": "m"}]}, "/is_paused": {"is_paused": False}}
        known["/v1/completions"] = {"choices": []}
        text = json.dumps(known.get(self.path)) if self.path in known else self.server.texts.pop(0)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self):
        self.server.token.wait(9)
        self.do_GET()

    def log_message(self, *_said):
        pass


@pytest.fixture
def api():
    with LocalServer(Api) as server:
        server.token, server.texts = threading.Event(), []
        server.settings = {"url": server.url, "frozen": 1, "name": "x", "watts": 0, "workers": {}}
        yield server
        server.token.set()


@pytest.mark.parametrize(
    ("texts", "proof"),
    [
        ([IDLE, IDLE], "it has nothing to do"),
        ([BUSY, BUSY], ""),
        ([BUSY + CACHE + "0.1", BUSY + CACHE + "0.2"], "its counters move"),
        ([BUSY + SLEEPS, BUSY + SLEEPS], "it sleeps"),
        (["http_requests_total 1", "http_requests_total 2"], "it has no counters, and answers"),
    ],
)
def test_what_figures_prove(api, texts, proof):
    api.texts, liveness = texts, Liveness(api.settings)
    liveness.find_proof()
    assert liveness.find_proof() == proof


def test_a_token_proves_that_it_came_and_nothing_while_it_is_waited_for(api):
    # A sixth of it is what /metrics may take, on a busy machine as well.
    api.texts, liveness = [BUSY] * 9, Liveness({**api.settings, "frozen": 9})
    liveness.find_proof()
    liveness.moved = liveness.asked = time.monotonic() - 9
    assert [liveness.find_proof() for _ in range(2)] == ["", ""]
    assert "2 requests, and no step; a token" in liveness.doubt
    api.token.set()
    liveness.question.join()
    assert liveness.find_proof() == "a token came"


def test_the_copied_scripts_run_by_themselves(tmp_path):
    files = units_of(cluster("a"), [node_facts(tmp_path)], "openai/gpt-oss-20b").node_files()[0]
    for name in ("group.py", "alive.py", "group.json"):
        (tmp_path / name).write_text(files[name])
    group = json.loads(files["group.json"])["id"]
    compiler = shutil.copy("/bin/sleep", tmp_path / "cc1plus")
    with subprocess.Popen([compiler, "9"], env={"PATCHKIT_CLUSTER": "vllm"}) as process:
        for given, says in ((group, "works: cc1plus compiles"), ("other", "of another start")):
            words = [sys.executable, "-sEB", str(tmp_path / "alive.py"), "working", given, "0"]
            done = subprocess.run(words, capture_output=True, text=True)
            assert says in done.stdout, done.stderr
        process.kill()
