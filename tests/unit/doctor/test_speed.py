"""Divide steps into parts and name the part at fault; read a server that really runs."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patchkit.doctor.step_parts import StepMeasurements, explain_step, step_lines
from patchkit.doctor.step_server import (
    ServerProcess,
    engine_facts,
    find_server_process,
    read_delays,
    read_log,
)
from patchkit.errors import HostError
from support.decoding_server import LOG, STEP

SERVER = Path(__file__).parents[2] / "support" / "decoding_server.py"
FINE = {
    "eager": "no",
    "graphs": "fit",
    "forced": "no",
    "drafts": "off",
    "drafter": "no",
    "kv_usage": 0.1,
    "max_seqs": "8",
    "transport": "P2P",
    "process": "VLLM::EngineCor (process 7)",
}
# 15 GB at 4,000 GB/s, 36 layers with two all-reduces of 10 µs: 3.75 + 0.4 + 0.72 + 0.1 ms.
BASE = {
    "step_ms": 5.0,
    "tokens": 4.0,
    "requests": 4.0,
    "read_bytes": 15e9,
    "bandwidth": 4000.0,
    "kernel_ms": 0.4,
    "layers": 36,
    "ranks": 2,
    "all_reduce_us": 10.0,
    "idle": 0.02,
    "delay": 0.01,
}


def explained(facts=None, **changes):
    return explain_step(
        StepMeasurements(**{**BASE, **changes}, facts={**FINE, **(facts or {})})
    )


def test_the_parts_of_a_step_are_its_sum():
    step = explained()
    assert [round(part.ms, 2) for part in step.parts] == [3.75, 0.4, 0.72, 0.1]
    assert (round(step.rest_ms, 2), step.fault, step.lever) == (0.03, "", "")
    assert step_lines(step)[0].endswith("gives 4 tokens: 800 tok/s")
    assert step_lines(step)[-1] == "nothing is slow"


@pytest.mark.parametrize(
    ("fault", "facts", "changes", "words"),
    [
        ("cpu", {}, {"delay": 0.5}, "EngineCor (process 7) waits 2.5 ms"),
        ("cpu", {}, {"delay": 0.2}, "EngineCor (process 7) waits 1 ms"),
        ("eager", {"eager": "yes"}, {"delay": 0.2}, "--enforce-eager"),
        ("batch", {}, {"waiting": 4.0}, "4 requests wait while 4 run"),
        ("cache", {"kv_usage": 0.97}, {"waiting": 4.0}, "the KV cache is full"),
        (
            "sockets",
            {"transport": "NET/Socket"},
            {"all_reduce_us": 150.0, "step_ms": 15.0},
            "all-reduces take 10.8 ms of each step",
        ),
        ("eager", {"eager": "yes"}, {"step_ms": 12.0}, "--enforce-eager"),
        (
            "graphs",
            {"graphs": "above", "batch": 12.0, "largest_graph": 8.0},
            {},
            "12 tokens a step are above the largest CUDA graph, 8",
        ),
        (
            "graphs",
            {"graphs": "far", "batch": 1.0, "next_graph": 8.0},
            {},
            "1 tokens a step run in a CUDA graph for 8",
        ),
        ("back-end", {"forced": "yes", "back_end": "--x A"}, {}, "the back end --x A"),
        ("drafter", {"drafter": "yes"}, {}, "nothing drafts"),
        ("drafts", {"accepted": 0.1, "drafts": "on"}, {}, "few are accepted: 0.1"),
        ("clock", {"clock": 0.3, "idle": 0.0, "mhz": 600.0}, {}, "at 600 MHz"),
        ("unknown", {}, {"step_ms": 10.0}, "unknown: 4.93 ms of a step"),
        ("", {"transport": "NET/Socket"}, {"all_reduce_us": 1.0}, "nothing is slow"),
        ("", {"drafter": "yes", "drafts": "on"}, {}, "nothing is slow"),
    ],
)
def test_the_part_at_fault_is_named(fault, facts, changes, words):
    step = explained(facts, **changes)
    assert (step.fault, words in step.verdict) == (fault, True), step.verdict


def test_what_is_not_known_is_said_and_accuses_nobody():
    unknown = dict.fromkeys(
        ("read_bytes", "all_reduce_us", "idle", "delay", "kernel_ms")
    )
    step = explained(facts=dict.fromkeys(FINE), **unknown)
    assert [part.ms for part in step.parts] == [None] * 4
    assert (step.fault, step.rest_ms) == ("unknown", 5.0)
    assert "not measured" in step_lines(step)[1]


@pytest.mark.parametrize(
    ("flags", "variables", "expected"),
    [
        ([], {}, ("no", "off", "", [1, 2, 4, 8], 0.5)),
        (["--enforce-eager"], {}, ("yes", "off", "", [1, 2, 4, 8], 0.5)),
        (
            ["--attention-backend", "TRITON_ATTN"],
            {"VLLM_ATTENTION_BACKEND": "FLASHINFER"},
            (
                "no",
                "off",
                "--attention-backend TRITON_ATTN, VLLM_ATTENTION_BACKEND=FLASHINFER",
                [1, 2, 4, 8],
                0.5,
            ),
        ),
    ],
)
def test_the_log_and_the_command_say_how_the_engine_is_set_up(
    flags, variables, expected
):
    log = LOG.format(model="m", eager="--enforce-eager" in flags).splitlines()
    server = ServerProcess(
        pid=1, words=("python", *flags), variables=variables, children=()
    )
    facts = engine_facts(server, read_log(log))
    names = ("eager", "drafts", "back_end", "sizes", "weights_gib")
    assert tuple(facts[name] for name in names) == expected


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def port(tmp_path):
    """Return the port of a server that runs two requests at once, with a model in tmp_path."""
    number = free_port()
    shape = {"num_hidden_layers": 8, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    words = [sys.executable, SERVER, str(number), tmp_path, "--max-num-seqs", "2"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(words, stdout=log) as server,
    ):
        while server.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", number)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        yield number
        server.terminate()


def test_a_server_is_found_by_its_port(port, tmp_path):
    process = find_server_process(port)
    assert process.words[1:4] == (str(SERVER), str(port), str(tmp_path))
    assert (process.python, process.log) == (sys.executable, tmp_path / "log")
    assert (len(process.children), process.is_contained) == (1, False)
    assert min(read_delays(process.children).values()) >= 0
    with pytest.raises(HostError, match="server's process") as raised:
        find_server_process(free_port())
    assert raised.value.why == "nothing listens there"


def test_bench_explains_a_server_that_runs(port, tmp_path, cli):
    url = f"http://127.0.0.1:{port}"
    words = ("bench", "--why", "toy", "--url", url, "--seconds", "1", "-o", tmp_path)
    done = cli(*words, "--concurrency", "4", "--json")
    step = json.loads(done.stdout)["step"]
    # The machine that runs this test may be busy, which goes before.
    assert step["fault"] in ("batch", "cpu")
    measured = step["measured"]
    assert (measured["requests"], measured["waiting"]) == (2, 2)
    assert measured["facts"]["max_seqs"] == "2"
    assert measured["step_ms"] >= 1000 * STEP
    assert json.loads((tmp_path / "why.json").read_text()) == step


def test_without_a_server_bench_says_what_to_start(cli):
    url = f"http://127.0.0.1:{free_port()}"
    done = cli("bench", "--why", "toy", "--url", url, rc=9)
    assert "patchkit up toy" in done.stderr
