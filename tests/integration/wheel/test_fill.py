"""Wheelhouses filled by a real uv, from folders and from an index."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from patchkit.errors import HashMismatchError
from patchkit.patching.recipe import load_recipe
from patchkit.wheel.file.wheelfile import WheelName
from patchkit.wheel.wheelhouse.fill import download_wheels
from patchkit.wheel.wheelhouse.resolve import LockedWheel
from patchkit.wheel.wheelhouse.storage import load_manifest
from support.filling import ALL, LOCK, THIS, TORCH, contents, installed, locked
from support.wheels import CPU, ELSEWHERE, HERE, OTHER_CPU


def test_a_lock_for_another_machine_and_another_python(world, fill, house, cli):
    world(ELSEWHERE, OTHER_CPU)
    done = fill()  # the Python of DGX OS, whichever runs this
    said, told = done.stdout, done.stderr.splitlines()

    assert locked(house) == ALL
    # Before each thing that may take long, in a pipe as well.
    assert (told[0].partition(" ")[0], told[1:]) == ("resolving", ["to download: 6"])
    assert (
        f"6 dependencies there and locked, 0 MB, for CPython 3.12 on {OTHER_CPU} with"
        in said
    )
    assert "torch 2.11.0: CUDA 13, as it has torch/lib/libtorch_cuda.so" in said
    assert {path.name for path in house.iterdir()} == {*contents(house)}
    assert len(contents(house)) == 3 + len(ALL)
    kinds = {entry.name.project: entry.kind for entry in load_manifest(house).wheels}
    assert (kinds["vllm"], kinds["torch"]) == ("built", "dependency")
    assert "2 wheels and 6 dependencies, all as listed" in cli("verify", house).stdout
    before = contents(house)
    assert json.loads(fill("--json").stdout)["new"] == []
    assert contents(house) == before
    fill("--python-version", "3.11")
    assert [each for each in locked(house) if each.startswith("for-")] == [
        "for-old==1.0"
    ]
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


@pytest.mark.parametrize(
    ("requires", "says"),  # vLLM's own requirements of NVIDIA's say nothing of torch
    [
        ("nvidia-cudnn-frontend", "none of NVIDIA's"),
        ("nvidia-cudnn-cu12", "no torch/lib/libtorch_cuda.so"),
    ],
)
def test_a_torch_for_cpus_alone(requires, says, built, offered, fill, house):
    built("0.19.1", project="vllm", requires=["torch==2.10.0"])
    offered(
        "torch",
        "2.10.0",
        HERE,
        requires=[requires],
        files={"torch/lib/libtorch.so": b""},
    )
    offered(requires, "1.0")
    before = contents(house)
    said = fill(rc=5).stderr
    assert f"torch 2.10.0 for {CPU} is one for CPUs alone" in said
    assert says in said
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
    assert (
        f"there is no set of wheels for CPython 3.12 on {CPU} with glibc 2.39 that fits"
        in said
    )
    assert says in said
    assert contents(house) == before
    assert not (house / ".filling").exists()


def test_refusals(world, fill, house, tmp_path):
    world()
    (tmp_path / "empty").mkdir()
    says = "--python-version takes a version such as 3.12, not '2.7'"
    assert says in fill("--python-version", "2.7", rc=2).stderr
    told = fill("--dir", "empty", rc=2).stderr
    assert "empty holds no wheel that patchkit built" in told
    assert f"patchkit repack vllm=={load_recipe('vllm').newest} --dir empty\n" in told
    wheel = next(house.glob("vllm*"))
    wheel.write_bytes(wheel.read_bytes() + b"0")
    assert f"{wheel.name} is not the wheel that was built" in fill(rc=8).stderr


def alone_with(url):
    alone = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "/nonexistent"}
    return {**alone, "PIP_INDEX_URL": url}


def test_an_index_with_a_password(world, index, house, cli):
    """It is given to uv and to the downloads, is in no list of processes, and in no message."""
    world()
    wrong = alone_with(index.url.replace("s3cret", "wr0ng"))
    refused = cli("wheelhouse", "fill", env=wrong, rc=3).stderr
    assert "401 Unauthorized" in refused
    said = cli("wheelhouse", "fill", env=alone_with(index.url))
    assert locked(house) == ALL
    assert b"pip\0compile" in index.arguments
    assert b"s3cret" not in index.arguments
    assert "s3cret" not in said.stdout + said.stderr
    assert "wr0ng" not in refused


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.e2e)]
)
def test_ended_while_it_downloads(
    number, world, offered, index, house, cli, environment, tmp_path
):
    """The next run goes on: no byte of a wheel that is there is asked for once more."""
    world()
    large = {**TORCH, "large.bin": os.urandom(1_200_000)}
    torch = offered(
        "torch", "2.11.0", HERE, requires=["nvidia-cudnn-cu13"], files=large
    )
    before = contents(house)
    index.stopped = torch.name
    process = subprocess.Popen(
        [sys.executable, "-m", "patchkit", "wheelhouse", "fill"],
        cwd=tmp_path,
        env={**environment, **alone_with(index.url)},
    )
    assert index.reached.wait(60)
    part = house / ".filling" / f".{torch.name}.partial"
    while (
        len(list((house / ".filling").glob("*.whl"))) < 2
        or part.stat().st_size < 500_000
    ):
        time.sleep(0.01)
    kept = part.stat().st_size
    process.send_signal(number)
    assert process.wait(30) == (143 if number == signal.SIGTERM else -number)

    assert contents(house) == before
    (left,) = json.loads(cli("verify", "--json", rc=7).stdout)["findings"]
    assert (left["where"], left["what"][:27]) == (
        ".filling",
        "left by an interrupted fill",
    )
    index.stopped, first = "", [*index.asked]
    index.asked.clear()
    cli("wheelhouse", "fill", env=alone_with(index.url))
    names = [
        [name.partition("-")[0] for name, _begin in asked]
        for asked in (first, index.asked)
    ]
    assert names == [["leaf", "nvidia_cudnn_cu13", "torch"], ["torch", "typing_thing"]]
    assert index.asked[0][1] >= kept
    assert locked(house) == [*ALL[1:4], *ALL[5:]]
    assert "all as listed" in cli("verify").stdout
    assert not (house / ".filling").exists()


def test_other_bytes_than_those_that_were_locked(offered, tmp_path):
    wheel = offered("six", "1.0")
    known = {"name": WheelName(wheel.name), "sha256": "0" * 64, "size": 0, "facts": {}}
    locked = LockedWheel(**known, url=wheel.as_uri())
    (tmp_path / "new").mkdir()
    with pytest.raises(
        HashMismatchError, match=r"six-1\.0-py3-none-any\.whl is not the file"
    ):
        download_wheels([locked], tmp_path / "new", lambda _done, _all: None)
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "upstream's"])
def test_flashinfers_modules_go_into_the_lock(
    built, offered, fill, house, cli, ours, tmp_path
):
    """The modules that were built, or those of an index, beside the FlashInfer that vLLM pins."""
    pin = "flashinfer-python==0.7.2.post1"
    built("0.33.0", project="vllm", requires=[pin])
    offered("flashinfer-python", "0.7.2.post1")
    offered("flashinfer-jit-cache", "0.7.2.post1+cu130")
    if ours:
        version = "0.7.2.post1+cu130.gb10.abc123"
        built(version, project="flashinfer-jit-cache", requires=[pin])
        fill()
        expected = f"flashinfer-jit-cache=={version}"
    else:
        fill("--with", "flashinfer-jit-cache==0.7.2.post1+cu130")
        expected = "flashinfer-jit-cache==0.7.2.post1+cu130"
    assert expected in locked(house)
    assert pin in locked(house)
    cli("verify", house)


def test_modules_for_another_flashinfer_are_refused(built, offered, fill, house):
    built("0.33.0", project="vllm", requires=["flashinfer-python==0.7.2.post1"])
    built(
        "0.6.13+cu130.gb10.abc123",
        project="flashinfer-jit-cache",
        requires=["flashinfer-python==0.6.13"],
    )
    for version in ("0.6.13", "0.7.2.post1"):
        offered("flashinfer-python", version)
    assert "flashinfer-python" in fill(rc=3).stderr
    assert not list(house.glob("flashinfer_python*"))
