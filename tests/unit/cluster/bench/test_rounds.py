"""Rounds of a benchmark, and what one that fails leaves."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from patchkit.cluster.bench.rounds import (
    BenchLoad,
    MeasuredServer,
    bench_python,
    describe_conditions,
    measure_rounds,
    result_file,
    run_benchmark,
    server_of,
)
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import ClusterNode
from patchkit.errors import HostError, UsageError
from support import write_files

LOADS = [
    BenchLoad(depth=1024, output=128, concurrency=n, prompts=4 * n) for n in (1, 8)
]
# Stands for a Python with vLLM: finds it, and answers `bench serve` as $ANSWERED says.
ASKER = f"""#!{sys.executable}
import json, os, sys
words = sys.argv
if "-c" in words:
    sys.exit(0)
place = words[words.index("--result-dir") + 1] + "/" + words[words.index("--result-filename") + 1]
assert "http://spark-1.invalid:8000" in words
json.dump({{"completed": int(os.environ["ANSWERED"]), "output_throughput": 5.5}}, open(place, "w"))
"""


def server(python="", **changes):
    fields = {"url": "http://spark-1.invalid:8000", "model": "m", "tokenizer": "m"}
    return MeasuredServer(**(fields | {"python": str(python)} | changes))


def test_a_server_is_measured_once_and_only_whole(tmp_path, monkeypatch):
    asker = write_files(tmp_path, {"python": ASKER}, mode=0o755) / "python"
    folder = tmp_path / "results"
    place = result_file(folder, LOADS[0].name, 0)
    steps = []

    def measure():
        measure_rounds(server(asker), LOADS[:1], 1, folder, steps.append)

    monkeypatch.setenv("ANSWERED", "3")
    with pytest.raises(HostError, match="3 of 4 requests were answered"):
        measure()
    assert not place.exists()

    monkeypatch.setenv("ANSWERED", "4")
    steps.clear()
    measure()
    assert json.loads(place.read_text())["output_throughput"] == 5.5
    load = "in1024-out128-c1"
    assert steps == [f"{load}: the server warms up", f"round 1 of 1: {load}"]
    # Only rounds are results, and of a server at a URL nothing else is known.
    assert [path.name for path in folder.rglob("*.json")].count("1.json") == 1
    assert len(list(folder.rglob("*.json"))) == 2
    assert json.loads((folder / "digest.json").read_text())["machines"] == []

    with pytest.raises(UsageError, match="holds results already"):
        measure()


def test_one_load_has_its_answer(tmp_path, monkeypatch):
    asker = write_files(tmp_path, {"python": ASKER}, mode=0o755) / "python"
    monkeypatch.setenv("ANSWERED", "8")
    load = BenchLoad(depth=128, output=128, concurrency=1, prompts=8)
    place = tmp_path / "bench" / "1.json"
    answer = run_benchmark(server(asker), load, place, seconds=60)
    assert answer == {"completed": 8, "output_throughput": 5.5}


def test_an_environment_without_vllm_is_named_before_a_server_starts(tmp_path):
    bare = Path(shutil.which("python3", path="/usr/bin:/bin"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(bare)
    with pytest.raises(HostError, match="vllm bench serve is not here") as raised:
        bench_python(str(tmp_path))
    assert "--venv DIR" in raised.value.hint
    file = Cluster(members=(ClusterNode(ssh="spark-1"),), venv="/nowhere")
    with pytest.raises(HostError, match="/nowhere/bin/python: vllm bench serve is not"):
        server_of(file, "org/one", "")


def test_conditions_hold_no_secret_and_no_address():
    words = ("vllm", "serve", "m", "--api-key", "sk-" + "a1b2c3d4" * 4)
    shared = {"HF_TOKEN": "hf_" + "Ab1" * 11, "NCCL_DEBUG": "INFO"}
    served = server(words=(*words, "--master-addr=10.0.0.1"), shared=shared)
    said = json.dumps(describe_conditions(served, LOADS))
    for private in ("a1b2c3d4", "Ab1", "10.0.0.1"):
        assert private not in said
    assert '"NCCL_DEBUG": "INFO"' in said
