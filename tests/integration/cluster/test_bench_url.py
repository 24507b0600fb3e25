"""Measure a server that runs elsewhere, from a machine that has no vLLM."""

import json
import shutil
import sys
from pathlib import Path

import pytest

RESULT = Path(__file__).parents[2] / "data/bench/benchy/raw/eager/in64-out16-c1/1.json"
BENCHY = f"""#!{sys.executable}
import shutil, sys
assert "http://spark-1.invalid:8000/v1" in sys.argv
shutil.copy({str(RESULT)!r}, sys.argv[sys.argv.index("--save-result") + 1])
"""


@pytest.fixture
def bare(tmp_path):
    """An environment without vLLM."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to(shutil.which("python3", path="/usr/bin:/bin"))
    return tmp_path / "venv"


def bench(cli, bare, *options, rc=0):
    return cli(
        *("bench", "small", "--url", "http://spark-1.invalid:8000/v1", "--venv", bare),
        *("--input", 64, "--output", 16, "--concurrency", 1, "--rounds", 1),
        *("-o", bare / "results", *options),
        rc=rc,
    )


def test_the_program_that_is_missing_is_named_before_anything_is_written(cli, bare):
    said = bench(cli, bare, rc=9).stderr

    assert "vllm bench serve is not here" in said
    assert "--venv DIR" in said
    assert "uv tool install llama-benchy" in said
    assert "served" not in said
    assert not (bare / "results").exists()


def test_llama_benchy_needs_no_vllm(cli, bare):
    program = bare / "bin/llama-benchy"
    program.write_text(BENCHY)
    program.chmod(0o755)

    bench(cli, bare, "--tool", "llama-benchy")

    digest = json.loads((bare / "results/digest.json").read_text())
    # Of the server's machine nothing is known; this one's would be taken for it.
    assert digest["machine"] == {}
    assert digest["variants"]["served"]["command"] == []
    assert "in64-out16-c1" in (bare / "results/summary.csv").read_text()
