"""Divide steps into parts and name the part at fault; read a server that really runs."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patchkit.doctor.step_parts import explain_step, step_lines
from patchkit.doctor.step_server import (
    ServerProcess,
    find_server_process,
    log_lines,
    read_log,
    read_setup,
)
from patchkit.errors import HostError
from patchkit.frozen import Fields
from patchkit.records import RECIPES, read_toml
from support.decoding_server import LOG, STEP
from support.needed import need

TESTS = Path(__file__).parents[2]
SERVER = TESTS / "support" / "decoding_server.py"
# Runs of tests/e2e/proofs/why.py on an H200 with vLLM 0.25.1. The last one measured a short kernel,
# as a GPU without a server did twice (0.96 to 1.0 µs); the others ran before that was measured.
MEASURED = [
    json.loads(line)
    for line in (TESTS / "data" / "bench" / "h200-why.jsonl").read_text().splitlines()
]
SHORT_KERNEL = 0.00097
# 15 GB at 4,000 GB/s, 36 layers with two all-reduces of 10 µs: 3.75 + 0.4 + 0.72 + 0.1 ms.
FINE = {
    "step_ms": 5.0,
    "tokens": 4.0,
    "speed": 800.0,
    "running": 4.0,
    "waiting": 0.0,
    "kv-usage": 0.1,
    "read_gb": 15.0,
    "bandwidth": 4000.0,
    "ms_per_gb": 0.25,
    "layers": 36.0,
    "layer_kernels": 8,
    "kernel_ms": 0.4 / 36 / 8,
    "reductions": 72.0,
    "reduction_ms": 0.01,
    "transport": "P2P",
    "nccl": "by NCCL alone",
    "busy": 98.0,
    "delay": 0.01,
    "host": 0.02,
    "process": "VLLM::EngineCor (process 7)",
    "eager": "False",
    "graph_mode": "FULL",
    "graph_ratio": 1.0,
    "forced": "",
    "speculative": "None",
    "drafter": "",
    "max_seqs": "8",
}


def test_the_parts_of_a_step_are_its_sum():
    step = explain_step(FINE)
    parts = [round(part.ms, 2) for part in step.parts]
    assert parts == [3.75, 0.4, 0.72, 0.1, 0.03]
    assert (sum(parts), step.fault.id, step.fault.hint) == (5.0, "none", "")
    lines = step_lines(step)
    assert lines[0].endswith("gives 4 tokens: 800 tok/s")
    assert lines[3] == "    0.72 ms  all-reduce: by NCCL alone, over P2P"
    assert lines[-1] == "nothing is slow"


@pytest.mark.parametrize(
    ("fault", "changes", "words"),
    [
        ("cpu", {"delay": 0.5}, "EngineCor (process 7) waits for a core"),
        ("cpu", {"delay": 0.2}, "for 0.2 of the time"),
        ("eager", {"eager": "True", "delay": 0.2}, "--enforce-eager"),
        ("eager", {"graph_mode": "NONE"}, "cudagraph_mode is NONE"),
        ("batch", {"waiting": 4.0}, "4 requests wait while 4 run"),
        ("cache", {"kv-usage": 0.97, "waiting": 4.0}, "the KV cache is full"),
        (
            "sockets",
            {"sockets": "NET/Socket", "reduction_ms": 0.15, "step_ms": 15.0},
            "all-reduces take 10.8 ms of each step",
        ),
        (
            "graphs",
            {"graph_ratio": 8 / 12, "batch": 12.0, "graph": 8.0},
            "12 tokens a step are above the largest CUDA graph, 8",
        ),
        (
            "graphs",
            {"graph_ratio": 8.0, "batch": 1.0, "graph": 8.0},
            "1 tokens a step run in a CUDA graph for 8",
        ),
        ("back-end", {"forced": "--x A"}, "by patchkit's rules: --x A"),
        ("drafter", {"drafter": "{}"}, "nothing drafts"),
        ("drafts", {"accepted": 0.1, "speculative": "x"}, "few are accepted: 0.1"),
        ("clock", {"mhz": 600.0}, "at 600 MHz"),
        ("unknown", {"step_ms": 10.0}, "unknown: 5.03 ms of a step"),
        ("unknown", {"step_ms": 3.5}, "too long, -1.47 ms of the step are left"),
        ("none", {"sockets": "NET/Socket", "reduction_ms": 0.001}, "nothing is slow"),
        ("none", {"drafter": "{}", "speculative": "x"}, "nothing is slow"),
    ],
)
def test_the_part_at_fault_is_named(fault, changes, words):
    # The GPU is idle for 0.1 ms a step, however long that is.
    step_ms = changes.get("step_ms", 5.0)
    row = explain_step({**FINE, "host": 0.1 / step_ms, **changes}).fault
    assert (row.id, words in row.what) == (fault, True), row.what


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: row["fault"])
def test_runs_of_a_gpu_are_named_and_their_parts_are_the_step(row):
    load = read_toml(Fields, RECIPES / "bench.toml", key="load")
    step = explain_step(
        {
            **row["measured"],
            "layer_kernels": load["decode"]["layer_kernels"],
            "kernel_ms": SHORT_KERNEL,
        }
    )
    assert step.fault.id == row["expected"]
    assert abs(step.parts[-1].ms) < 0.1 * row["measured"]["step_ms"]


def test_what_is_not_known_is_said_and_accuses_nobody():
    step = explain_step({"step_ms": 5.0})
    assert [part.ms for part in step.parts] == [None] * 4 + [5.0]
    assert step.fault.id == "unknown"
    assert "unknown GB at unknown GB/s" in step_lines(step)[1]


@pytest.mark.parametrize(
    ("flags", "variables", "eager", "forced"),
    [
        ([], {}, "False", ""),
        (["--enforce-eager", "-tp", "2"], {}, "True", ""),
        (
            ["--attention-backend", "TRITON_ATTN", "--all2all-backend", "naive"],
            {"VLLM_ATTENTION_BACKEND": "FLASHINFER"},
            "False",
            "VLLM_ATTENTION_BACKEND FLASHINFER, --attention-backend TRITON_ATTN",
        ),
    ],
)
def test_the_log_and_the_command_say_how_the_engine_is_set_up(
    flags, variables, eager, forced
):
    log = LOG.format(model="m", eager="--enforce-eager" in flags).splitlines()
    server = ServerProcess(
        folder=Path("/proc/1"),
        words=("python", *flags),
        variables=variables,
        engines={},
    )
    setup = read_setup(server, flags, log)
    assert (setup["eager"], setup["forced"]) == (eager, forced)
    assert setup["ranks"] == (2.0 if flags[1:2] == ["-tp"] else 1.0)
    assert (setup["speculative"], setup["graph_sizes"]) == ("None", "1, 2, 4, 8")


@pytest.mark.parametrize(
    ("line", "name", "text"),
    [
        ("{'cudagraph_mode': <CUDAGraphMode.NONE: 0>}", "graph_mode", "NONE"),
        ('{"cudagraph_mode":0,"x":1}', "graph_mode", "0"),
        ("'cudagraph_mode': <CUDAGraphMode.FULL: 2>", "graph_mode", "FULL"),
        ("Channel 00/0 : 0[0] -> 1[0] via NET/Socket/0", "sockets", "NET/Socket"),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/IPC", "transport", "P2P"),
        ("speculative_config=SpeculativeConfig(x)", "speculative", "SpeculativeConfig"),
    ],
)
def test_a_line_of_the_log_says_a_fact(line, name, text):
    assert read_log([line])[name] == text


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def port(tmp_path, request):
    """Return the port of a server that runs two requests at once, with a model in tmp_path.

    A parameter has figures of its metrics.
    """
    number = free_port()
    shape = {"num_hidden_layers": 8, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    # A checkpoint for those who read no more than its header.
    weights = {"lm_head.weight": {"dtype": "BF16", "data_offsets": [0, 8_000_000]}}
    header = json.dumps(weights).encode()
    length = len(header).to_bytes(8, "little")
    (tmp_path / "model.safetensors").write_bytes(length + header)
    words = [sys.executable, SERVER, str(number), tmp_path, "--max-num-seqs", "2"]
    words += ["--odd", json.dumps(getattr(request, "param", {}))]
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
    need("ss")
    process = find_server_process(f"http://127.0.0.1:{port}")
    assert process.words[:4] == (sys.executable, str(SERVER), str(port), str(tmp_path))
    assert log_lines(None, process, None) == (tmp_path / "log").read_text().splitlines()
    assert (len(process.engines), len(process.read_delays())) == (1, 1)
    with pytest.raises(HostError, match="no process of this user") as raised:
        find_server_process(f"http://127.0.0.1:{free_port()}")
    assert raised.value.why.startswith("nothing listens there")


def test_bench_explains_a_server_that_runs(port, tmp_path, cli):
    need("ss")
    url = f"http://127.0.0.1:{port}"
    words = ("bench", "--why", "toy", "--url", url, "--seconds", "1", "-o", tmp_path)
    done = cli(*words, "--concurrency", "4", "--json")
    step = json.loads(done.stdout)["step"]
    assert step["fault"]["id"] == "batch"
    measured = step["measured"]
    assert (measured["running"], measured["waiting"]) == (2, 2)
    shape = (measured["max_seqs"], measured["layers"], measured["read_gb"])
    assert shape == ("2", 8, 0.008)
    assert measured["step_ms"] >= 1000 * STEP
    assert json.loads((tmp_path / "why.json").read_text()) == step


@pytest.mark.parametrize(
    "port",
    [{"num_requests_running": "NaN"}, {"kv_cache_usage_perc": ""}],
    indirect=True,
)
def test_metrics_without_a_needed_figure_are_no_traceback(port, tmp_path, cli):
    need("ss")
    url = f"http://127.0.0.1:{port}"
    words = ("bench", "--why", "toy", "--url", url, "--seconds", "1", "-o", tmp_path)
    done = cli(*words, rc=9)
    assert "/metrics counts no steps" in done.stderr


def test_without_a_server_bench_says_what_to_start(cli):
    url = f"http://127.0.0.1:{free_port()}"
    done = cli("bench", "--why", "toy", "--url", url, rc=9)
    assert "patchkit up MODEL" in done.stderr
