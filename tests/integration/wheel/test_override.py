"""A pin that is overridden: recorded once, followed by fill and verify, installed by pip and uv."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import venv

import pytest
from click.testing import CliRunner
from uv import find_uv_bin

from patchkit.cli import group
from patchkit.errors import SourceError, UsageError
from patchkit.wheel.wheelhouse.contents import add_wheel, load_manifest
from patchkit.wheel.wheelhouse.overrides import default_version
from support.wheels import HERE, write_wheel

OURS = "2.30.7+gb10.abc123"
PIN = "nvidia-nccl-cu13==2.30.7"
BUG = "NCCL 2.28.9 deadlocks across nodes with CUDA graphs"
TORCH = {"torch/lib/libtorch_cuda.so": b"", "torch/__init__.py": b""}
NCCL = "nvidia-nccl-cu13==2.28.9; sys_platform == 'linux'"
THIS = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture
def house(tmp_path):
    return tmp_path / "wheelhouse"


@pytest.fixture
def built(tmp_path, house):
    """Put a wheel into the wheelhouse as a build does: ``built("0.25.1", project="vllm")``."""
    return lambda version, **more: add_wheel(
        house, write_wheel(tmp_path / "made", version, **more), {"target": "gb10"}
    )


@pytest.fixture
def world(built, tmp_path):
    """A vLLM that leads to torch 2.11 and with it to NCCL 2.28.9; stock's 2.30.7 is to be had."""
    offered = tmp_path / "offered"
    built("0.25.1", project="vllm", requires=["torch==2.11.0", "leaf"])
    write_wheel(
        offered,
        "2.11.0",
        project="torch",
        tag=HERE,
        requires=["nvidia-cudnn-cu13", NCCL],
        files=TORCH,
    )
    for project in ("leaf", "nvidia-cudnn-cu13"):
        write_wheel(offered, "1.0", project=project, tag="py3-none-any")
    for version in ("2.28.9", "2.30.7"):
        write_wheel(offered, version)


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Run patchkit in this process: ``call("verify", rc=2)``; its own errors are raised."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, rc=0, env=None):
        done = CliRunner().invoke(group, [str(each) for each in arguments], env=env)
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == rc, done.output
        return done

    return run


@pytest.fixture
def fill(call, world, tmp_path):
    """`patchkit wheelhouse fill` for this very Python, from what is offered alone."""
    alone = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    options = ["--offline", "--find-links", tmp_path / "offered", "--python-version", THIS]
    return lambda *more: call("wheelhouse", "fill", *options, *more, env=alone)


@pytest.fixture
def run(tmp_path):
    """Run a command line as it was printed, for an empty environment: ``run("pip install …")``."""
    venv.create(tmp_path / "node", with_pip=False)
    node = str(tmp_path / "node/bin/python")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    settings = {**clean, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    programs = {
        "pip": [sys.executable, "-m", "pip", "--python", node],
        "uv": [find_uv_bin(), "--no-config", "pip"],
    }

    def make(line, by="pip", rc=0):
        verb, *words = shlex.split(line.partition("pip ")[2])
        into = ["--python", node, "--offline"] if by == "uv" else []
        done = subprocess.run(
            [*programs[by], verb, *into, *words],
            cwd=tmp_path,
            env=settings,
            capture_output=True,
            text=True,
        )
        assert done.returncode == rc, done.stdout + done.stderr
        return done.stdout + done.stderr

    return make


def versions(house):
    return {entry.name.project: str(entry.name.version) for entry in load_manifest(house).wheels}


def line_of(said, word):
    """The one line of an output that holds a word."""
    (line,) = (line.strip() for line in said.splitlines() if word in line)
    return line


@pytest.mark.e2e
def test_the_whole_way_around_a_pin(built, fill, call, house, run):
    """The circle of 0.25.1: the pinned release has a bug, and is built again."""
    offer = call("verify", house).stdout
    assert f"beware {BUG} (known bug: vllm issue 52504, cured by 2.30.4" in offer
    assert str(default_version(house)[0]) == "2.28.9"

    override = line_of(offer, "next, ").removeprefix("next, to take another one: patchkit ")
    assert override == f"wheelhouse override --dir {house} {PIN}"
    said = call(*shlex.split(override)).stdout
    assert f"{PIN} in the place of 2.28.9, which torch 2.11.0 pins: {BUG} (the user)" in said
    assert line_of(said, "next:") == f"next: patchkit build nccl --dir {house}"
    version, why = default_version(house)
    assert (str(version), why.partition(",")[0]) == ("2.30.7", f"{PIN} in the place of 2.28.9")

    built(OURS)
    install = line_of(fill().stdout, "pip install")
    assert versions(house)["nvidia-nccl-cu13"] == OURS
    verified = call("verify").stdout
    assert "override nvidia-nccl-cu13==2.30.7 in the place of 2.28.9" in verified
    assert "2 wheels and 3 dependencies, all as listed" in verified
    assert "beware" not in verified

    # No resolver takes the lock as it is: the printed line says --no-deps, and that it takes.
    for by in ("pip", "uv"):
        assert "2.28.9" in run(install.replace(" --no-deps", ""), by, rc=1)
        assert OURS in run(install, by)
        run("pip uninstall nvidia-nccl-cu13" + (" --yes" if by == "pip" else ""), by)
    run(install)
    (complaint,) = (line for line in run("pip check", rc=1).splitlines() if line)
    assert complaint.startswith(f"torch 2.11.0 has requirement {NCCL.partition(';')[0]}")
    assert complaint.endswith(f"but you have nvidia-nccl-cu13 {OURS}.")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["numpy==2.0"], "pinned are torch==2.11.0, nvidia-nccl-cu13==2.28.9"),
        (["nvidia-nccl-cu13==2.28.9"], "is no release later than 2.28.9, which torch 2.11.0 pins"),
        ([f"nvidia-nccl-cu13=={OURS}"], "is no release later than 2.28.9"),
        (["nvidia-nccl-cu13>=2.30"], "is not a pin, PROJECT==VERSION"),
        (["torch==2.14.0"], "was compiled against torch==2.11.0"),
        ([PIN, "--reason", "a\nb"], "is not one line"),
        ([PIN, "--remove", "torch"], "exclude each other"),
        (["--remove", "nvidia-nccl-cu13"], "there is no override of nvidia-nccl-cu13"),
        (["--reason", "because"], "--reason is for a pin"),
        ([PIN, "--dir", "elsewhere"], "elsewhere: no such folder"),
    ],
)
def test_refusals(arguments, says, world, house, call):
    before = {path.name: path.read_bytes() for path in house.iterdir()}
    with pytest.raises(UsageError) as caught:
        call("wheelhouse", "override", *arguments)
    assert says in str(caught.value)
    assert {path.name: path.read_bytes() for path in house.iterdir()} == before


def test_a_record_that_was_edited(world, call, house):
    call("wheelhouse", "override", PIN)
    place = house / "manifest.json"
    text = place.read_text()
    place.write_text(text.replace("2.30.7", "2.31.2"))
    found = json.loads(call("verify", "--json", rc=8).stdout)["findings"]
    assert {each["where"] for each in found} == {"requirements.txt", "SHA256SUMS"}
    for damaged in (
        text.replace('"reason"', '"reasons"'),
        text.replace("2.30.7", "2.27.7"),
        text.replace('"the user"', '"the\\nuser"'),
        text.replace("torch 2.11.0", "torch"),
    ):
        assert damaged != text
        place.write_text(damaged)
        with pytest.raises(SourceError, match=r"cannot be read: overrides\[1\]"):
            call("verify")
