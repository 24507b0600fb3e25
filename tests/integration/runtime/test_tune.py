"""patchkit tune, from the command line to the file; a stand-in for the benchmark has no GPU."""

import json
import os

import pytest

from patchkit.measure.tune import BENCHMARK
from patchkit.source.detect import detect
from support import write_files

NAME = "E=128,N=768,device_name=NVIDIA_GB10,dtype=fp8_w8a8.json"
RELEASE = f"""\
import argparse, json, os, sys
import ray

parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--tp-size", type=int)
parser.add_argument("--dtype", choices=["auto", "fp8_w8a8"])
parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 2])
parser.add_argument("--tune", action="store_true")
parser.add_argument("--save-dir")
args = parser.parse_args()
assert args.tune and args.model == "org/moe"
print("Start tuning over 1920 configurations...")
if os.environ.get("BENCHMARK") == "fault":
    sys.exit("RuntimeError: No CUDA GPUs are available")
rows = {{size: {{"BLOCK_SIZE_M": 16 * args.tp_size}} for size in args.batch_size}}
with open(args.save_dir + "/{NAME}", "w") as file:
    json.dump({{"triton_version": "3.6.0", **rows}}, file)
    if os.environ.get("BENCHMARK") == "cut":
        file.truncate(5)
"""


@pytest.fixture
def tune(cli, environment, tmp_path):
    """Run patchkit tune under the stand-ins: ``tune("--json", benchmark="fault")``."""
    site = write_files(tmp_path / "site", {"ray.py": ""})
    empty = ("setup.py", "CMakeLists.txt", "cmake/utils.cmake", "vllm/__init__.py")
    about = "Metadata-Version: 2.4\nName: vllm\nVersion: 0.25.1\n"
    files = {BENCHMARK: RELEASE, "PKG-INFO": about, **dict.fromkeys(empty, "")}
    root = write_files(tmp_path / "vllm-0.25.1", files)
    for name, version in (("vllm", "0.25.1+cu130"), ("ray", "2.50.0")):
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        write_files(site, {f"{name}-{version}.dist-info/METADATA": text})

    def run(*arguments, rc=0, benchmark=""):
        path = os.pathsep.join([environment["PYTHONPATH"], str(site)])
        words = ("tune", "--vllm-src", root, "--model", "org/moe", "-o", tmp_path / "out")
        return cli(*words, *arguments, rc=rc, env={"PYTHONPATH": path, "BENCHMARK": benchmark})

    return run


def test_the_file_is_put_where_vllm_is_told_to_look(tune, tmp_path):
    done = tune("--batch-sizes", "1,64", "--tp-size", "2", "--dtype", "fp8_w8a8", "--json")
    said = json.loads(done.stdout)
    assert said["setting"] == f"VLLM_TUNED_CONFIG_FOLDER={tmp_path / 'out'}"
    rows = json.loads((tmp_path / "out" / NAME).read_text())
    assert (rows["1"], rows["64"]) == ({"BLOCK_SIZE_M": 32}, {"BLOCK_SIZE_M": 32})
    assert "Start tuning over 1920" in done.stderr

    assert "holds tuned configs" in tune(rc=2).stderr
    tune("--force")
    assert set(json.loads((tmp_path / "out" / NAME).read_text())) == {"triton_version", "1", "2"}


@pytest.mark.parametrize(
    ("arguments", "benchmark", "rc", "says"),
    [
        ((), "fault", 9, "No CUDA GPUs are available"),
        ((), "cut", 3, "is not JSON"),
        (("--python", "no-such-python"), "", 9, "no-such-python"),
        (("--batch-sizes", "1,x"), "", 2, "--batch-sizes takes whole numbers"),
    ],
)
def test_what_cannot_be_done_leaves_nothing(tune, tmp_path, arguments, benchmark, rc, says):
    assert says in tune(*arguments, rc=rc, benchmark=benchmark).stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("before", "after", "rc", "says"),
    [
        ("site/vllm-0.25.1+cu130.dist-info", "site/vllm-0.26.0.dist-info", 3, "vLLM is 0.26.0"),
        ("site/ray-2.50.0.dist-info", "ray", 9, "has no ray"),
    ],
)
def test_a_machine_or_release_that_does_not_fit(tune, tmp_path, before, after, rc, says):
    place = (tmp_path / before).rename(tmp_path / after) / "METADATA"
    place.write_text(place.read_text().replace("0.25.1+cu130", "0.26.0"))
    assert says in tune(rc=rc).stderr


@pytest.mark.releases
def test_the_benchmark_of_every_release_takes_these_options(release, version):
    text = detect(release(version)).read(BENCHMARK)
    for option in ("model", "tp-size", "dtype", "batch-size", "tune", "save-dir"):
        assert f'"--{option}"' in text
