"""patchkit tune, from the command line to the file, without a GPU.

torch, triton and vllm are stand-ins that answer as a GB10 would and whose benchmark is a formula:
the process, the messages and the file are real, the times are not. What only a GPU can show is in
docs/tune.md; the last test runs it where PATCHKIT_GPU_PYTHON names a Python that has vLLM.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import patchkit
from patchkit.measure.tune.search import PARAMETERS, shared_memory
from patchkit.measure.tune.tune import BENCHMARK, GRID, check_benchmark
from patchkit.source.detect import detect

ALONE = str(Path(patchkit.__file__).parents[1])
NAME = "E=128,N=768,device_name=NVIDIA_GB10,dtype=fp8_w8a8.json"
SHAPE = ["--experts", "128", "--intermediate", "768", "--hidden", "2048", "--topk", "8"]
BEST = dict(zip(PARAMETERS, (16, 128, 256, 3, 8, 1), strict=True))

TORCH = """\
from types import SimpleNamespace

__version__ = "2.11.0"
bfloat16 = "bfloat16"
device = SimpleNamespace(
    name="NVIDIA GB10", major=12, minor=1, shared_memory_per_block_optin=101376,
    total_memory=128 << 30,
)
cuda = SimpleNamespace(is_available=lambda: True, get_device_properties=lambda number: device)
set_default_device = manual_seed = lambda value: None
"""
TRITON = """\
__version__ = "3.6.0"


class OutOfResources(Exception):
    pass


OutOfResources.__module__ = "triton.runtime.errors"
"""
RELEASE = """\
import math
import os
import signal
import time
from itertools import product

import ray
import triton
from ray.experimental.tqdm_ray import tqdm

NAMES = "BLOCK_SIZE_M BLOCK_SIZE_N BLOCK_SIZE_K num_stages num_warps GROUP_SIZE_M".split()
BEST = dict(zip(NAMES, (16, 128, 256, 3, 8, 1)))
DEFAULT = dict(zip(NAMES, (16, 64, 128, 4, 4, 1)), SPLIT_K=1)


@ray.remote(num_gpus=1)
class BenchmarkWorker:
    pass


def get_configs_compute_bound(use_fp16, block_quant_shape):
    values = (16, 32, 64, 128), (64, 128, 256), (64, 128, 256), (2, 3, 4), (4, 8), (1, 16)
    return [dict(zip(NAMES, chosen)) for chosen in product(*values)]


def _get_config_dtype_str(dtype, use_fp8_w8a8):
    return "fp8_w8a8" if use_fp8_w8a8 else None


def get_config_file_name(E, N, dtype, block_shape):
    block = f",block_shape={block_shape}".replace(" ", "") if block_shape else ""
    return f"E={E},N={N},device_name=NVIDIA_GB10,dtype={dtype}{block}.json"


def get_moe_configs(E, N, dtype, block_n, block_k):
    return None


def get_default_config(M, E, N, K, topk, dtype, block_shape):
    assert N in (2 * 768, 2 * 900_000)
    return DEFAULT


def benchmark_config(config, num_tokens, num_experts, shard_intermediate_size, hidden_size, topk,
                     dtype, use_fp8_w8a8, use_int8_w8a16, num_iters=100, block_quant_shape=None):
    print("noise on standard output")
    if mode := os.environ.get("BENCHMARK"):
        time.sleep(float(mode) if mode[0].isdigit() else 0)
        if mode == "crash" and num_tokens == 64:
            os._exit(7)
        if mode == "hang" and num_tokens == 64:
            signal.pause()
        if mode == "unfit" and config.get("SPLIT_K"):
            raise triton.OutOfResources("out of resource: shared memory")
        if mode == "fault":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return 100 + num_tokens * sum(abs(math.log2(config[n] / BEST[n])) for n in NAMES)
"""


@pytest.fixture
def tune(cli, environment, tmp_path):
    """Run patchkit tune under the stand-ins: ``tune("--json", benchmark="crash")``."""
    site, root = tmp_path / "site", tmp_path / "vllm-0.25.1"
    files = {
        site / "torch/__init__.py": TORCH,
        site / "triton/__init__.py": TRITON,
        site / "vllm/__init__.py": '__version__ = "0.25.1"\n',
        root / BENCHMARK: RELEASE,
        root / "PKG-INFO": "Metadata-Version: 2.4\nName: vllm\nVersion: 0.25.1\n",
        **{root / name: "" for name in ("setup.py", "CMakeLists.txt", "cmake/utils.cmake")},
        root / "vllm/__init__.py": "",
    }
    for place, text in files.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def run(*arguments, rc=0, benchmark="", env=None):
        path = os.pathsep.join([environment["PYTHONPATH"], str(site)])
        given = {"PYTHONPATH": path, "BENCHMARK": benchmark, **(env or {})}
        return cli(
            "tune",
            "--vllm-src",
            root,
            *SHAPE,
            "-o",
            tmp_path / "out",
            *arguments,
            rc=rc,
            env=given,
        )

    return run


@pytest.fixture
def written(tmp_path):
    """The file, without its triton_version."""

    def read(name=NAME):
        rows = json.loads((tmp_path / "out" / name).read_text())
        assert rows.pop("triton_version") == "3.6.0"
        return {int(size): config for size, config in rows.items()}

    return read


def test_the_best_config_is_found_compared_and_written(tune, written):
    done = tune("--batch-sizes", "1,64", "--json")
    found = json.loads(done.stdout)
    rows = written()

    assert (found["device"], found["shared_memory"], found["complete"]) == (
        "NVIDIA GB10",
        101_376,
        True,
    )
    assert found["file"].endswith(NAME)
    assert [row["batch_size"] for row in found["rows"]] == [1, 64]
    # The formula: 100 µs for the best, and a step per doubling between it and the default.
    assert found["rows"][1]["untuned"]["microseconds"] == pytest.approx(
        [100 + 64 * 3.415] * 5, abs=0.1
    )
    assert found["rows"][1]["tuned"] == {"config": BEST, "microseconds": [100.0] * 5}
    assert found["rows"][1]["ratio"] == pytest.approx(3.186, abs=0.01)
    assert (rows[1], rows[64]) == (BEST, BEST)
    assert set(rows) == set(GRID)
    assert max(shared_memory(row, 1) for row in rows.values()) <= 101_376
    assert "noise" not in done.stdout


def test_what_people_see(tune, tmp_path):
    said = tune("--batch-sizes", "64").stdout
    assert "NVIDIA GB10, vLLM 0.25.1, torch 2.11.0, triton 3.6.0" in said
    assert "64   3.19  tuned        318.6 (318.6-318.6)  100.0 (100.0-100.0)" in said
    assert f"VLLM_TUNED_CONFIG_FOLDER={tmp_path / 'out'}" in said.replace("\n", "")


def test_block_shape_and_bf16_are_part_of_the_name(tune, written):
    tune("--batch-sizes", "1", "--block-shape", "128,128")
    assert written(NAME.replace(".json", ",block_shape=[128,128].json"))[1] == BEST
    assert "dtype=None" in tune("--batch-sizes", "1", "--dtype", "auto").stdout


def test_an_existing_file_is_not_replaced_unasked(tune, tmp_path):
    place = tmp_path / "out" / NAME
    place.parent.mkdir()
    place.write_text("mine")

    assert f"{NAME} exists" in tune("--batch-sizes", "1", rc=2).stderr
    assert place.read_text() == "mine"
    tune("--batch-sizes", "1", "--force")
    assert place.read_text() != "mine"


def test_a_spent_budget_keeps_the_best_so_far_and_says_so(tune, written):
    done = tune("--batch-sizes", "64,128,256", "--budget", "1", "--repeats", "3", benchmark="0.2")
    assert "search cut short, best so far kept: batch sizes 64" in done.stdout
    assert "the budget was spent: batch sizes 128, 256 stay untuned" in done.stdout
    assert written()[256]["SPLIT_K"] == 1


def test_a_default_that_cannot_run_here(tune, written):
    done = tune("--batch-sizes", "64", benchmark="unfit")
    assert "untuned cannot run" in done.stdout
    assert written()[64] == BEST


def test_a_process_that_dies_leaves_what_was_compared(tune, written):
    done = tune("--batch-sizes", "1,64", benchmark="crash")
    assert "the measuring process ended: exit code 7, after 'noise" in done.stdout
    assert "batch sizes 64 stay untuned" in done.stdout
    assert written()[1] == BEST


def test_an_interrupt_keeps_what_was_compared(environment, tune, tmp_path, written):
    """The second batch size is being measured when it comes, since that one never ends."""
    tune("--repeats", "1", rc=2)  # lays the files out
    path = os.pathsep.join([environment["PYTHONPATH"], str(tmp_path / "site")])
    command = [sys.executable, "-m", "patchkit", "tune", "--vllm-src", tmp_path / "vllm-0.25.1"]
    command += [*SHAPE, "--batch-sizes", "1,64", "-o", tmp_path / "out"]
    with subprocess.Popen(
        [*map(str, command)],
        env={**environment, "PYTHONPATH": path, "BENCHMARK": "hang"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert any("batch size 64" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)

    assert (process.returncode, said[1]) == (0, "")
    assert "interrupted: batch sizes 64 stay untuned" in said[0]
    assert written()[1] == BEST


def test_the_file_alone_goes_to_standard_output(tune, tmp_path):
    printed = tune("--batch-sizes", "1", "-o", "-").stdout
    assert not (tmp_path / "-").exists()
    assert not (tmp_path / "out").exists()

    tune("--batch-sizes", "1")
    (file,) = (tmp_path / "out").iterdir()
    assert json.loads(file.read_text()) == json.loads(printed)


@pytest.mark.parametrize(
    ("arguments", "settings", "rc", "says"),
    [
        (["--batch-sizes", "1"], {"benchmark": "fault"}, 9, "an illegal memory access"),
        ([], {"env": {"PYTHONPATH": ALONE}}, 9, "torch cannot be imported"),
        # Before a source is fetched: none of this name could be.
        (["--vllm-src", "vllm==99.0"], {"env": {"PYTHONPATH": ALONE}}, 9, "torch cannot be"),
        (["--python", "no-such-python"], {}, 9, "no-such-python: No such file or directory"),
        (["--intermediate", "900000"], {}, 9, "the device has 128 GiB"),
        (["--batch-sizes", "1,x"], {}, 2, "--batch-sizes takes some numbers"),
        (["--block-shape", "128"], {}, 2, "--block-shape takes 2 numbers"),
        (["--repeats", "1"], {}, 2, "--repeats"),
    ],
)
def test_what_cannot_be_done(tune, tmp_path, arguments, settings, rc, says):
    assert says in tune(*arguments, rc=rc, **settings).stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "before", "after", "rc", "says"),
    [
        ("site/vllm/__init__.py", "0.25.1", "0.26.0", 3, "the installed vLLM is 0.26.0"),
        ("site/torch/__init__.py", "lambda: True", "lambda: False", 9, "sees no CUDA device"),
        (f"vllm-0.25.1/{BENCHMARK}", "import triton", "import gone", 3, "does not fit"),
        (f"vllm-0.25.1/{BENCHMARK}", "def get_moe", "def got_moe", 3, "has no get_moe_configs"),
        (f"vllm-0.25.1/{BENCHMARK}", "num_iters", "rounds", 4, "gone: num_iters"),
    ],
)
def test_a_machine_or_release_that_does_not_fit(tune, tmp_path, file, before, after, rc, says):
    place = tmp_path / file
    place.write_text(place.read_text().replace(before, after))
    assert says in tune("--batch-sizes", "1", rc=rc).stderr


@pytest.mark.releases
def test_the_benchmark_of_every_release_can_be_called(release, version):
    assert check_benchmark(detect(release(version))).is_file()


@pytest.mark.skipif(
    "PATCHKIT_GPU_PYTHON" not in os.environ,
    reason="NOT RUN: needs a GPU; set PATCHKIT_GPU_PYTHON to a Python with vLLM 0.25.1",
)
def test_on_the_present_gpu(cli, release, tmp_path):
    shape = ["--experts", "8", "--intermediate", "256", "--hidden", "512", "--topk", "2"]
    limits = [
        "--batch-sizes",
        "16",
        "--max-configs",
        "5",
        "--python",
        os.environ["PATCHKIT_GPU_PYTHON"],
    ]
    done = cli(
        "tune", "--vllm-src", release("0.25.1"), *shape, *limits, "--out", tmp_path, "--json"
    )
    assert json.loads(done.stdout)["rows"][0]["tuned"]["microseconds"]
    assert list(tmp_path.glob("E=8,N=256,*.json"))
