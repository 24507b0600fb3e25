"""Wheelhouses filled by a real uv, from folders."""

from __future__ import annotations

import json
import subprocess

import pytest

from patchkit.wheel.wheelhouse.contents import load_manifest
from support.filling import ALL, LOCK, THIS, contents, installed, locked
from support.wheels import CPU, ELSEWHERE, HERE, OTHER_CPU


def test_a_lock_for_another_machine_and_another_python(world, fill, house, cli):
    world(ELSEWHERE, OTHER_CPU)
    done = fill()  # the Python of DGX OS, whichever runs this
    said, told = done.stdout, done.stderr.splitlines()

    assert locked(house) == ALL
    # Before each thing that may take long, in a pipe as well.
    assert [line.partition(" ")[0] for line in told] == ["resolving", "to"]
    assert told[1:] == ["to download: 6"]
    assert f"6 dependencies there and locked, 0 MB, for CPython 3.12 on {OTHER_CPU} with" in said
    assert "torch 2.11.0: CUDA 13, as it has torch/lib/libtorch_cuda.so" in said
    assert {path.name for path in house.iterdir()} == {*contents(house)}
    assert len(contents(house)) == 3 + len(ALL)
    kinds = {entry.name.project: entry.kind for entry in load_manifest(house).wheels}
    assert [kinds[name] for name in ("vllm", "nvidia-nccl-cu13", "torch", "leaf")] == [
        *("built", "built", "dependency", "dependency")
    ]
    assert "2 wheels and 6 dependencies, all as listed" in cli("verify", house).stdout
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=house, check=True)

    before = contents(house)
    assert json.loads(fill("--json").stdout)["new"] == []
    assert contents(house) == before

    fill("--python-version", "3.11")
    assert [each for each in locked(house) if each.startswith("for-")] == ["for-old==1.0"]
    assert not list(house.glob("for_new*"))


def test_only_a_lock(world, fill, house, cli):
    world()
    fill("--lock-only")
    assert locked(house) == ALL
    assert len(contents(house)) == 3 + 2
    header = (house / "requirements.txt").read_text().splitlines()[:2]
    assert header[0].endswith(f"for CPython 3.12 on {CPU} with glibc 2.39:")
    assert "--no-index" not in header[1]
    assert "all as listed" in cli("verify").stdout
    listed = json.loads(cli("wheelhouse", "list", "--json").stdout)["wheels"]
    assert {wheel["kind"] for wheel in listed} == {"built", "locked"}

    assert "--no-index" in fill().stdout
    assert len(contents(house)) == 3 + len(ALL)


def test_every_node_installs_the_same(world, fill, house, node):
    world()
    fill("--python-version", THIS)
    node("install", "--no-index", *LOCK)
    assert installed(node) == locked(house)
    assert "No broken requirements found" in node("check")


@pytest.mark.parametrize("seen", ["requirements", "file"])
def test_a_torch_for_cpus_alone(seen, built, offered, fill, house):
    built("0.19.1", project="vllm", requires=["torch==2.10.0"])
    # vLLM's own requirements of NVIDIA's say nothing of torch.
    requires = ["nvidia-cudnn-frontend" if seen == "requirements" else "nvidia-cudnn-cu12"]
    offered("torch", "2.10.0", HERE, requires=requires, files={"torch/lib/libtorch.so": b""})
    offered(*(*requires, "1.0"))
    before = contents(house)

    said = fill(rc=5).stderr

    assert f"torch 2.10.0 for {CPU} is one for CPUs alone" in said
    assert (
        "none of NVIDIA's" if seen == "requirements" else "no torch/lib/libtorch_cuda.so"
    ) in said
    assert contents(house) == before


@pytest.mark.parametrize(
    ("requires", "says"),
    [
        ("gone>=1", "gone was not found"),
        ("only-source", "only-source==1.0 has no usable wheels"),
        ("other-cpu", "no wheels with a matching platform tag"),
        ("a, b<2", "all versions of a depend on b>=2"),
    ],
)
def test_what_cannot_be_had(requires, says, built, offered, fill, house, tmp_path):
    built("0.25.1", project="vllm", requires=requires.split(", "))
    offered("other-cpu", "1.0", ELSEWHERE)
    offered("a", "1.0", requires=["b>=2"])
    offered("b", "1.0")
    offered("b", "2.0")
    (tmp_path / "offered/only_source-1.0.tar.gz").write_bytes(b"")
    before = contents(house)

    said = fill(rc=3).stderr

    assert f"there is no set of wheels for CPython 3.12 on {CPU} with glibc 2.39 that fits" in said
    assert says in said
    assert contents(house) == before
    assert not (house / ".filling").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--python-version", "2.7"], "--python-version takes a version such as 3.12, not '2.7'"),
        (["--dir", "empty"], "empty holds no wheel that patchkit built"),
    ],
)
def test_refusals(arguments, says, world, fill, tmp_path):
    world()
    (tmp_path / "empty").mkdir()
    assert says in fill(*arguments, rc=2).stderr


def test_a_wheel_that_was_changed_since(world, fill, house):
    world()
    wheel = next(house.glob("vllm*"))
    wheel.write_bytes(wheel.read_bytes() + b"0")
    assert f"{wheel.name} is not the wheel that was built" in fill(rc=8).stderr
