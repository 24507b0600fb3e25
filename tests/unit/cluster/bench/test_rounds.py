"""The order of rounds, a real server process, and what a benchmark that fails leaves."""

import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from patchkit.cluster.bench.benchmark import BenchLoad, Benchmark, run_benchmark
from patchkit.cluster.bench.figures import result_file
from patchkit.cluster.bench.rounds import (
    BenchPlan,
    PlannedVariant,
    bench_python,
    describe_conditions,
    measure_variants,
    plan_cluster,
)
from patchkit.cluster.launch.cluster import Cluster
from patchkit.cluster.launch.cluster_file import ClusterNode
from patchkit.cluster.launch.up import StartWatcher
from patchkit.doctor.proof import PROOF_SETTINGS
from patchkit.errors import HostError, UsageError
from support import write_files

LOADS = [
    BenchLoad(depth=1024, output=128, concurrency=n, prompts=4 * n) for n in (1, 8)
]
SILENT = StartWatcher(*[lambda *_: None] * 3)
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


def plan(folder, *names, rounds=2, loads=LOADS, **facts):
    variants = [PlannedVariant(name=name, **{"python": "", **facts}) for name in names]
    return BenchPlan(
        model="small",
        variants=variants,
        loads=loads,
        rounds=rounds,
        folder=folder,
    )


def test_the_order_turns_with_each_round(tmp_path):
    order = list(plan(tmp_path, "a", "b", rounds=5).turns())
    by_round = [
        [each.name for number, each in order if number == one] for one in range(5)
    ]
    assert by_round[0] == ["a", "b"]
    assert all(after == before[::-1] for before, after in pairwise(by_round))


def test_a_server_elsewhere_is_measured_once_and_only_whole(tmp_path, monkeypatch):
    asker = write_files(tmp_path, {"python": ASKER}, mode=0o755) / "python"
    where = {"python": str(asker), "url": "http://spark-1.invalid:8000"}
    of = plan(tmp_path / "results", "served", rounds=1, loads=LOADS[:1], **where)
    place = result_file(of.folder, "served", LOADS[0].name, 0)

    monkeypatch.setenv("ANSWERED", "3")
    with pytest.raises(HostError, match="3 of 4 requests were answered"):
        measure_variants(of, SILENT, lambda _: None)
    assert not place.exists()
    monkeypatch.setenv("ANSWERED", "4")
    steps = []
    measure_variants(of, SILENT, steps.append)
    assert json.loads(place.read_text())["output_throughput"] == 5.5
    assert steps == ["round 1 of 1, served", "round 1 of 1, served: in1024-out128-c1"]
    # Of the server's machine nothing is known; this one's would be taken for it.
    assert json.loads((of.folder / "digest.json").read_text())["machines"] == []

    with pytest.raises(UsageError, match="holds results already"):
        measure_variants(of, SILENT, steps.append)


def test_one_load_has_its_answer(tmp_path, monkeypatch):
    asker = write_files(tmp_path, {"python": ASKER}, mode=0o755) / "python"
    monkeypatch.setenv("ANSWERED", "8")
    benchmark = Benchmark(
        python=str(asker),
        url="http://spark-1.invalid:8000",
        model="proof",
        tokenizer="proof",
        load=BenchLoad(**PROOF_SETTINGS["serve"]["load"]),
        seconds=60,
    )
    answer = run_benchmark(benchmark, tmp_path / "bench" / "serve-cold.json")
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
        plan_cluster(file, "a", "org/one", "", ())


def test_conditions_hold_no_secret_and_no_address():
    variant = PlannedVariant(
        name="a",
        python="",
        words=(
            "vllm",
            "serve",
            "m",
            "--api-key",
            "sk-" + "a1b2c3d4" * 4,
            "--master-addr=10.0.0.1",
        ),
        shared={"HF_TOKEN": "hf_" + "Ab1" * 11, "NCCL_DEBUG": "INFO"},
    )
    said = json.dumps(describe_conditions("m", [variant], LOADS))
    for private in ("a1b2c3d4", "Ab1", "10.0.0.1"):
        assert private not in said
    assert '"NCCL_DEBUG": "INFO"' in said
    with pytest.raises(UsageError, match="two variants are called 'a'"):
        describe_conditions("m", [variant, variant], LOADS)
