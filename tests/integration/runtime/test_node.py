"""What a node runs works from the wheel and click alone, in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support import hosts

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """patchkit without its dependencies, but click."""
    folder = tmp_path_factory.mktemp("node")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", f"--wheel-dir={folder}", str(REPOSITORY))
    (wheel,) = folder.glob("patchkit-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    run(*pip, "install", f"--target={site}", "click")
    with zipfile.ZipFile(wheel) as bundle:
        bundle.extractall(site)
    return (str(folder / "venv/bin/python"), "-m", "patchkit")


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_cluster_from_the_wheel_and_click_alone(program, tmp_path):
    head, worker = (hosts.build(tmp_path, "cable_port0", node=node) for node in (0, 1))
    facts = json.loads(run(*program, "probe", "--json", f"--root={head}"))
    assert facts["gpus"][0]["name"] == "NVIDIA GB10"
    env = (*program, "env", "--triton=3.8.0")
    asked = ("--role=head", "--vllm=0.33.0", "--nccl=2.30.7", f"--root={head}")
    run(*env, *asked, f"--output={tmp_path}/head.env")
    text = run(*env, "--role=worker", f"--from={tmp_path}/head.env", f"--root={worker}")
    assert "\nVLLM_HOST_IP=192.168.100.11\n" in text
    assert "NCCL_IB_HCA" in run(*program, "env", "explain")
    assert "nothing speaks against it" in run(
        *program, "env", "check", "--no-host", f"{tmp_path}/head.env"
    )
    line = run(*program, "serve-args", "openai/gpt-oss-120b", f"--from={tmp_path}/head.env")
    assert line.startswith("vllm serve openai/gpt-oss-120b --tensor-parallel-size 2 ")
    bare = hosts.build(tmp_path, "ipv6_only")
    assert "192.168.100.11/24" in run(*program, "net", "plan", "--role=head", f"--root={bare}")
