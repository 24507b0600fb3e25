"""Download by a real uv's lock: sizes first, never twice, and on after an end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from patchkit.errors import HashMismatchError
from patchkit.wheel.file.name import wheel_name
from patchkit.wheel.wheelhouse.contents import add_wheel
from patchkit.wheel.wheelhouse.fill import download_wheels
from patchkit.wheel.wheelhouse.resolve import LockedWheel
from support.filling import ALL, FACTS, TORCH, contents, locked
from support.wheels import HERE, write_wheel


def alone_with(index):
    return {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "/nonexistent",
        "PIP_INDEX_URL": index.url,
    }


def test_an_index_with_a_password(world, index, house, cli):
    """It is given to uv and to the downloads, is in no list of processes, and in no message."""
    world()
    wrong = alone_with(SimpleNamespace(url=index.url.replace("s3cret", "wr0ng")))
    refused = cli("wheelhouse", "fill", env=wrong, rc=3).stderr
    assert "401 Unauthorized" in refused
    said = cli("wheelhouse", "fill", env=alone_with(index))
    assert locked(house) == ALL
    assert b"pip\0compile" in index.arguments
    assert b"s3cret" not in index.arguments
    assert "s3cret" not in said.stdout + said.stderr
    assert "wr0ng" not in refused


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.e2e)]
)
def test_ended_while_it_downloads(number, world, offered, index, house, cli, environment, tmp_path):
    """The next run goes on: no byte of a wheel that is there is asked for once more."""
    world()
    large = {**TORCH, "large.bin": os.urandom(1_200_000)}
    torch = offered("torch", "2.11.0", HERE, requires=["nvidia-cudnn-cu13"], files=large)
    before = contents(house)
    index.stopped = torch.name
    process = subprocess.Popen(
        [sys.executable, "-m", "patchkit", "wheelhouse", "fill"],
        cwd=tmp_path,
        env={**environment, **alone_with(index)},
    )
    assert index.reached.wait(60)
    part = house / ".filling" / f".{torch.name}.partial"
    while len(list((house / ".filling").glob("*.whl"))) < 2 or part.stat().st_size < 500_000:
        time.sleep(0.01)
    kept = part.stat().st_size
    process.send_signal(number)
    assert process.wait(30) == (143 if number == signal.SIGTERM else -number)

    assert contents(house) == before
    (left,) = json.loads(cli("verify", "--json", rc=7).stdout)["findings"]
    assert (left["where"], left["what"][:27]) == (".filling", "left by an interrupted fill")
    index.stopped, first = "", [*index.asked]
    index.asked.clear()
    cli("wheelhouse", "fill", env=alone_with(index))
    assert [name.partition("-")[0] for name, _begin in first] == [
        "leaf",
        "nvidia_cudnn_cu13",
        "torch",
    ]
    assert [name.partition("-")[0] for name, _begin in index.asked] == ["torch", "typing_thing"]
    assert index.asked[0][1] >= kept
    assert locked(house) == [*ALL[1:4], *ALL[5:]]
    assert "all as listed" in cli("verify").stdout
    assert not (house / ".filling").exists()

    index.asked.clear()
    cli("wheelhouse", "fill", env=alone_with(index))
    assert index.asked == []


@pytest.mark.e2e
def test_a_full_disk(small_disk, built, offered, cli, fill, tmp_path):
    disk = small_disk("size=300k") / "house"
    add_wheel(
        disk, write_wheel(tmp_path / "made", "1.0", project="vllm", requires=["large"]), FACTS
    )
    offered("large", "1.0", files={"large.bin": os.urandom(400_000)})
    before = contents(disk)
    assert "No space left on device" in fill("--dir", disk, rc=7).stderr
    assert contents(disk) == before
    assert "all as listed" in cli("verify", disk).stdout


def test_other_bytes_than_those_that_were_locked(offered, tmp_path):
    wheel = offered("six", "1.0")
    locked = LockedWheel(name=wheel_name(wheel.name), sha256="0" * 64, url=wheel.as_uri(), size=0)
    (tmp_path / "new").mkdir()
    with pytest.raises(HashMismatchError, match=r"six-1\.0-py3-none-any\.whl is not the file"):
        download_wheels([locked], tmp_path / "new", lambda _done, _all: None)
    assert not list((tmp_path / "new").iterdir())
