"""Measure one model after the other, with another tool, and say which were not."""

import shutil
import sys
from pathlib import Path

import pytest

from patchkit.errors import HostError, RecipeError, UsageError
from patchkit.measure.bench.every_model import (
    insist_on_all,
    measure_every,
    models_here,
    models_pinned,
)
from patchkit.measure.bench.measure import TOOLS, BenchClient, measure
from patchkit.measure.bench.planned import planned
from patchkit.measure.bench.results import MAIN, digest_of, series
from patchkit.measure.bench.summary import markdown
from patchkit.measure.bench.variants import Variant, loads, read_variants

DATA = Path(__file__).parents[3] / "data" / "bench"
COMMIT = "0123456789ab" + 28 * "0"
(LOAD,) = loads((64,), (16,), (2,), 2)


def test_figures_of_a_real_run_of_llama_benchy():
    found = series(DATA / "benchy", MAIN)
    assert [(each.load, each.measure.name, each.text) for each in found] == [
        ("in64-out16-c1", "pp", "7136 (6766-7505) !"),
        ("in64-out16-c1", "tg", "193.3 (129.7-256.9) !"),
        ("in64-out16-c1", "e2e_ttft", "24.16 (24.02-24.3) !"),
        ("in64-out16-c2", "pp", "2890 (1558-4221) !"),
        ("in64-out16-c2", "tg", "110.1 (52.44-167.8) !"),
        ("in64-out16-c2", "e2e_ttft", "66.34 (62.3-70.38) !"),
    ]
    assert "| in64-out16-c1 | pp, tok/s | 7136" in markdown(found, digest_of(DATA / "benchy"))


def test_a_model_that_fails_does_not_end_the_others(tmp_path):
    def one(name, place):
        if name == "org/bad":
            raise HostError("no\ntoken", why="it has no kernel", hint="patchkit doctor")
        shutil.copytree(DATA / "benchy", place)

    told = []
    done = measure_every({"org/bad": COMMIT, "good": COMMIT}, tmp_path / "all", one, told.append)

    assert [each.error is None for each in done] == [False, True]
    assert done[1].folder == tmp_path / "all" / "good@0123456789ab"
    assert told == ["model 1 of 2: org/bad", "org/bad: no\ntoken", "model 2 of 2: good"]
    summary = (tmp_path / "all" / "summary.md").read_text()
    assert "| good | in64-out16-c1 | eager | pp, tok/s | 7136 (6766-7505) ! |" in summary
    assert summary.endswith("\nNot measured: org/bad: no token\n")
    with pytest.raises(HostError, match="1 of 2 models were not measured: org/bad") as raised:
        insist_on_all(done)
    assert (raised.value.why, raised.value.hint) == (
        "org/bad: it has no kernel",
        "patchkit doctor",
    )
    insist_on_all(done[1:])


def test_models_are_those_that_lie_here_or_that_a_cluster_pins(tmp_path):
    with pytest.raises(UsageError, match="no whole model lies in"):
        models_here(str(tmp_path))
    file = tmp_path / "cluster.toml"
    file.write_text(f'[[node]]\nssh = "spark-1"\n[models]\n"org/one" = "{COMMIT}"\n')
    assert models_pinned(file) == {"org/one": COMMIT}
    file.write_text('[[node]]\nssh = "spark-1"\n')
    with pytest.raises(UsageError, match="pins no model"):
        models_pinned(file)


def test_a_cluster_needs_the_benchmark_here_and_is_not_plain(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text('venv = "/nowhere"\n[[node]]\nssh = "spark-1"\n')
    with pytest.raises(HostError, match="/nowhere/bin/python is not on this machine"):
        planned([Variant(name="two", cluster=str(file))], "org/one")
    ways = tmp_path / "ways.toml"
    ways.write_text('[[variant]]\nname = "two"\ncluster = "c.toml"\nplain = true\n')
    with pytest.raises((UsageError, RecipeError), match="neither plain nor env_file"):
        read_variants(ways)


def test_llama_benchy_is_looked_for_beside_the_python_that_asks(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    client = BenchClient(python=str(tmp_path / "python"), url="http://127.0.0.1:1", model="m")
    tool, place = TOOLS["llama-benchy"], tmp_path / "raw" / "1.json"
    with pytest.raises(HostError, match="llama-benchy is not installed"):
        measure(tool, client, LOAD, place, seed=0)
    program = tmp_path / "llama-benchy"
    program.write_text(f"#!{sys.executable}\nimport sys; sys.exit(' '.join(sys.argv[1:]))\n")
    program.chmod(0o755)
    with pytest.raises(HostError, match="--pp 64 --tg 16 --exact-tg --concurrency 2 --runs 2"):
        measure(tool, client, LOAD, place, seed=0)
    assert not place.exists()


@pytest.mark.parametrize(
    ("tool", "said", "trouble"),
    [
        ("vllm", {"completed": 4}, ""),
        ("vllm", {"completed": 3}, "3 of 4 requests were answered"),
        ("vllm", {}, "None of 4 requests were answered"),
        ("llama-benchy", {"benchmarks": [{"e2e_ttft": {"mean": 1.5}}]}, ""),
        ("llama-benchy", {"benchmarks": [{"e2e_ttft": None}]}, "no request was answered"),
        ("llama-benchy", {"benchmarks": []}, "no request was answered"),
    ],
)
def test_what_is_wrong_with_a_result(tool, said, trouble):
    assert TOOLS[tool].trouble(said, LOAD) == trouble
