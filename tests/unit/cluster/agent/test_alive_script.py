"""Check what proves that a server lives, and what the copied script does by itself."""

import contextlib
import http.server
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from patchkit.cluster.agent.alive_script import FiredError, Liveness, write_stacks
from patchkit.cluster.launch.units import SCRIPTS
from support.clusters import cluster, node_facts, units_of
from support.local_server import LocalServer

IDLE = 'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_running{engine="1"} 0.0\n'
BUSY = IDLE.replace(" 0.0", " 1.0")
STEPS = 'vllm:generation_tokens_total{engine="0"} '
WAITING = 'vllm:num_requests_waiting{engine="0"} '
SLOW = "slow"
BROKEN = "broken"
NO_COUNTERS = "up 1\n"
CACHE = 'vllm:kv_cache_usage_perc{engine="0",model_name="a } b"} '
SLEEPS = 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n'


# The control group of this process, which listens, is that of the group's unit.
UNIT = Path("/proc/self/cgroup").read_text().splitlines()[-1].rpartition("/")[2]


class Api(http.server.BaseHTTPRequestHandler):
    """`/metrics` gives the texts one after the other; a token comes once it may."""

    def do_GET(self):
        known = {
            "/v1/models": {"data": [{"id": "m"}]},
            "/is_paused": {"is_paused": False},
        }
        known["/v1/completions"] = {"choices": [{"text": "a"}]}
        text = (
            json.dumps(known.get(self.path))
            if self.path in known
            else self.server.texts.pop(0)
        )
        if text.startswith(SLOW):
            self.server.over.wait(60)
            text = text.removeprefix(SLOW)
        refused = self.server.refuses if self.command == "POST" else 0
        self.send_response(500 if text == BROKEN else refused or 200)
        self.end_headers()
        with contextlib.suppress(OSError):  # who asks went away
            self.wfile.write(text.encode())

    def do_POST(self):
        self.server.asked += 1
        self.server.token.wait(60)
        self.do_GET()

    def log_message(self, *_said):
        pass


@pytest.fixture
def api():
    with LocalServer(Api) as server:
        server.token, server.over = threading.Event(), threading.Event()
        server.texts, server.asked, server.refuses = [], 0, 0
        server.settings = {
            "url": server.url,
            "frozen": 1,
            "name": "x",
            "unit": UNIT,
            "watts": 0,
            "workers": {},
        }
        yield server
        server.token.set()
        server.over.set()


class Watched(Liveness):
    """A watch that keeps the reason of its last doubt."""

    def find_proof(self):
        life = self.look()
        self.doubt = "" if life.proof else life.text
        return life.proof


def watched(api, frozen=1.0, **ago):
    """Return what watches a server, which last moved, or was asked, so many seconds ago."""
    watch = Watched({**api.settings, "frozen": frozen})
    for name, seconds in ago.items():
        setattr(watch, name, time.monotonic() - seconds)
    return watch


@pytest.mark.parametrize(
    ("texts", "proof"),
    [
        ([IDLE, IDLE], "it has nothing to do"),
        ([BUSY, BUSY], ""),
        ([BUSY + STEPS + "1", BUSY + STEPS + "2"], "its counters move"),
        ([BUSY + CACHE + "0.1", BUSY + CACHE + "0.2"], "its gauges move"),
        ([BUSY + CACHE + "0.1", BUSY + CACHE + "NaN"], ""),
        ([BUSY + STEPS + "1", BUSY + STEPS + "+Inf"], ""),
        ([BUSY + STEPS + "1", BUSY + STEPS + "-2"], ""),
        ([BUSY + WAITING + "1", BUSY + WAITING + "2"], ""),
        ([BUSY.replace("1.0", "1e400"), IDLE], "it has nothing to do"),
        ([BUSY + SLEEPS, BUSY + SLEEPS], "it sleeps"),
        (
            ["http_requests_total 1", "http_requests_total 2"],
            "it answers /metrics, which has no counters",
        ),
    ],
)
def test_what_figures_prove(api, texts, proof):
    api.texts, watch = texts, watched(api, 9)
    watch.find_proof()
    assert watch.find_proof() == proof


def test_a_token_proves_that_it_came_and_nothing_while_it_is_waited_for(api):
    # A sixth of it is what /metrics may take, on a busy machine as well.
    api.texts, watch = [BUSY] * 9, watched(api, 9)
    watch.find_proof()
    watch.last_step_at = time.monotonic() - 9
    watch.last_question_at = watch.last_step_at
    assert [watch.find_proof() for _ in range(2)] == ["", ""]
    assert "2 requests, and no step; no token in the" in watch.doubt
    api.token.set()
    watch.question.join()
    assert watch.find_proof() == "a token came"


def test_a_token_counts_though_metrics_are_silent(api):
    api.texts, watch = [SLOW] * 2, watched(api, 1, last_step_at=9, last_question_at=9)
    assert watch.find_proof() == ""
    assert "/metrics does not answer: no answer in" in watch.doubt
    api.token.set()
    watch.question.join()
    assert watch.find_proof() == "a token came"


@pytest.mark.parametrize(
    ("step", "proof"), [("1", "it answers /metrics, late"), ("2", "its counters move")]
)
def test_an_answer_of_metrics_counts_though_it_is_late(api, step, proof):
    rows = [BUSY + STEPS + number for number in ("1", step)]
    api.texts = [rows[0], SLOW + rows[1], rows[1]]
    watch = watched(api, 60, last_step_at=60, last_question_at=60)
    assert watch.find_proof() == ""
    threading.Timer(
        11, api.over.set
    ).start()  # late is what takes more than 60 / 6 seconds
    assert watch.find_proof() == proof
    # The next answer is prompt, and shows that the engine stands still.
    assert watch.find_proof() == ""


def test_gauges_that_move_count_for_a_while_and_a_token_that_never_comes_counts_more(
    api,
):
    api.texts = [BUSY + CACHE + f"0.{number}" for number in range(1, 9)]
    watch = watched(api, 9, last_step_at=9, last_question_at=9)
    watch.find_proof()
    assert (watch.find_proof(), api.asked) == ("its gauges move", 1)
    watch.last_question_at -= 4 * watch.patience
    assert (watch.find_proof(), api.asked) == ("", 1)


def test_a_server_without_counters_is_asked_and_its_token_is_not_waited_for_without_end(
    api,
):
    """With --disable-log-stats, or where something before it has no /metrics."""
    api.texts = [NO_COUNTERS] * 9
    watch = watched(api, 9, last_step_at=700, last_question_at=700)
    assert (watch.find_proof(), api.asked) == (
        "it answers /metrics, which has no counters",
        1,
    )
    watch.last_question_at -= 4 * watch.patience
    assert watch.find_proof() == ""
    assert "no token in the " in watch.doubt


def test_metrics_with_an_error_are_no_sign_of_life(api):
    api.texts, watch = [BUSY + STEPS + "1", BROKEN, BUSY + STEPS + "2"], watched(api, 9)
    assert [watch.find_proof() for _ in range(2)] == ["", ""]
    assert "/metrics says 500" in watch.doubt
    assert watch.find_proof() == "its counters move"


@pytest.mark.parametrize("status", [401, 429])
def test_a_question_that_is_refused_is_told_as_no_token(api, status):
    api.texts, api.refuses = [BUSY] * 9, status
    api.token.set()
    watch = watched(api, 9, last_step_at=9, last_question_at=9)
    assert watch.find_proof() == f"it refuses the question: HTTP {status}"
    assert watch.find_proof() == ""


def test_a_question_that_is_interrupted_is_no_token(api):
    """As when systemd sends SIGABRT while the watch waits for the answer."""

    def fire(*_signal):
        raise FiredError

    api.texts = [BUSY] * 9
    watch = watched(api, 9, last_step_at=9, last_question_at=9)
    assert watch.find_proof() == ""
    former = signal.signal(signal.SIGALRM, fire)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(FiredError):
            watch.question.join(60)
    finally:
        signal.signal(signal.SIGALRM, former)
    assert watch.find_proof() == ""


@pytest.mark.skipif(not shutil.which("ss"), reason="ss is not installed (iproute2)")
def test_no_question_goes_to_a_stranger(api):
    api.texts, api.settings["unit"] = [BUSY], "patchkit-none.service"
    watch = watched(api, 9, last_step_at=9, last_question_at=9)
    assert "python" in watch.find_proof()
    assert (api.asked, watch.question) == (0, None)


def test_the_copied_scripts_run_by_themselves(tmp_path):
    files = units_of(
        cluster("a"), [node_facts(tmp_path)], "openai/gpt-oss-20b"
    ).node_files()[0]
    for name in (*SCRIPTS, "group.json"):
        (tmp_path / name).write_text(files[name])
    group = json.loads(files["group.json"])["id"]
    compiler = shutil.copy("/bin/sleep", tmp_path / "cc1plus")
    with subprocess.Popen(
        [compiler, "60"], env={"PATCHKIT_CLUSTER": "vllm"}
    ) as process:
        for given, says in (
            (group, "works: cc1plus compiles"),
            ("other", "of another start"),
        ):
            words = [
                sys.executable,
                "-sEB",
                str(tmp_path / "alive.py"),
                "working",
                given,
                "0",
            ]
            done = subprocess.run(words, capture_output=True, text=True)
            assert says in done.stdout, done.stderr
        process.kill()


def test_a_file_of_stacks_that_is_gone_hides_no_other(tmp_path, capsys):
    """Where one raises, the server that hangs is not killed."""
    (tmp_path / "VLLM_STACK_DUMP_for_1").symlink_to(tmp_path / "gone")
    (tmp_path / "VLLM_STACK_DUMP_for_2").write_text("in all_reduce\n")
    # A rank in a container that nobody can enter: no process of this machine gets a signal.
    write_stacks(
        {"unit": "patchkit-none.service", "stacks": str(tmp_path), "inside": ["false"]}
    )
    assert "VLLM_STACK_DUMP_for_2: in all_reduce" in capsys.readouterr().out
