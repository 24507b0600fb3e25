"""A wheelhouse with what was built, what there is to be had, and a node that installs it."""

import os
import sys
import venv
from functools import partial

import pytest
from uv import find_uv_bin

from patchkit.wheel.wheelhouse.storage import add_wheel
from support import filling, run_program
from support.filling import FACTS, OURS, TORCH
from support.small_index import SmallIndex
from support.wheels import CPU, HERE, write_wheel


@pytest.fixture
def built(tmp_path, house):
    """Put a wheel into the wheelhouse as a build does: ``built("0.25.1", project="vllm")``."""
    return lambda version, **more: add_wheel(
        house, write_wheel(tmp_path / "made", version, **more), FACTS
    )


@pytest.fixture
def offered(tmp_path):
    """What there is to be had: ``offered("six", "1.0")``."""

    def make(project, version, tag="py3-none-any", **more):
        return write_wheel(
            tmp_path / "offered", version, project=project, tag=tag, **more
        )

    return make


@pytest.fixture
def world(offered, built):
    """A vLLM and an NCCL that were built here, and a torch that pins stock's NCCL."""

    def make(tag=HERE, cpu=CPU):
        built(
            "0.25.1",
            project="vllm",
            tag=tag,
            requires=["torch==2.11.0", "typing-thing>=1"],
        )
        built(OURS, tag=tag)
        requires = [
            "nvidia-cudnn-cu13",
            "nvidia-nccl-cu13==2.28.9; sys_platform == 'linux'",
            f"only-there; platform_machine == '{cpu}'",
            f"only-elsewhere; platform_machine != '{cpu}'",
            "for-old; python_version < '3.12'",
            "for-new; python_version >= '3.12'",
        ]
        offered("torch", "2.11.0", tag, requires=requires, files=TORCH)
        offered("nvidia-nccl-cu13", "2.28.9", tag)
        offered("nvidia-cudnn-cu13", "9.0")
        offered("typing-thing", "1.0")
        offered("typing-thing", "2.0", requires=["leaf"])
        for project in ("leaf", "only-there", "for-new", "for-old"):
            offered(project, "1.0")

    return make


@pytest.fixture
def fill(cli, tmp_path):
    """`patchkit wheelhouse fill` from what is offered."""
    (tmp_path / "offered").mkdir(exist_ok=True)
    return partial(filling.fill, cli, tmp_path / "offered")


@pytest.fixture
def node(tmp_path):
    """pip or uv for an empty virtual environment, without an index: ``node("install", ...)``."""
    venv.create(tmp_path / "node", with_pip=False)
    python = tmp_path / "node/bin/python"
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
    alone |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    alone["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"

    def run(verb, *arguments, by="pip", rc=0):
        command = [sys.executable, "-m", "pip", "--python", python, verb]
        if by == "uv":
            command = [
                find_uv_bin(),
                "--no-config",
                "pip",
                verb,
                "--python",
                python,
                "--offline",
            ]
        done = run_program(*command, *arguments, rc=rc, env=alone, cwd=tmp_path)
        return done.stdout + (done.stderr if verb != "list" else "")

    return run


@pytest.fixture
def index(offered, tmp_path):
    """An index with a password, of what is offered then."""
    with SmallIndex(tmp_path / "offered") as serving:
        yield serving
