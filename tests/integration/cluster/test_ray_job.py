"""The job of `patchkit export ray`, taken by a real Ray: by its REST API, as users send it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request

import pytest

from patchkit.measure.ray_job import job_text, ray_job
from support.manifests import planned

SECONDS = 120
RAY = shutil.which("ray")
pytestmark = pytest.mark.skipif(RAY is None, reason="no ray: pip install 'ray[default]'")


STAND_IN = """#!/usr/bin/env python3
import json, os, sys
open({place!r}, "w").write(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def ray(tmp_path):
    """Start a Ray of one node, with a stand-in for vLLM; return where it takes jobs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "vllm").write_text(STAND_IN.format(place=str(tmp_path / "said")))
    (programs / "vllm").chmod(0o755)
    port, dashboard = _free_port(), _free_port()
    place = tempfile.mkdtemp(prefix="ray-")  # its sockets have names of 107 bytes at most
    command = [
        *(RAY, "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=1"),
        *("--node-ip-address=127.0.0.1", f"--port={port}", "--object-store-memory=100000000"),
        *("--include-dashboard=true", "--dashboard-host=127.0.0.1"),
        *(f"--dashboard-port={dashboard}", f"--temp-dir={place}"),
    ]
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "VLLM_HOST_IP": "127.0.0.1"}
    with (tmp_path / "ray.log").open("wb") as log:
        started = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{dashboard}/api/jobs/"
        _until(lambda: started.poll() is not None or _ask(url) == [])
        assert started.poll() is None, (tmp_path / "ray.log").read_text()
        yield url
    finally:
        started.terminate()
        started.wait(SECONDS)
        shutil.rmtree(place, ignore_errors=True)


def _ask(url, body=None):
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.loads(answer.read())


def _until(what):
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            if found := what():
                return found
        except OSError:
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline, what()
        time.sleep(0.5)


def test_a_real_ray_runs_the_command_with_the_variables(ray, tmp_path):
    hostile = "/srv/$(touch x)\" `id` 'b"
    plan = planned(tmp_path, hostile, executor="ray", set={"VLLM_LOGGING_LEVEL": "DEBUG"})
    job = ray_job(*plan)
    assert _ask(ray, job_text(job).encode())["submission_id"] == "vllm"
    ended = ("SUCCEEDED", "FAILED", "STOPPED")
    state = _until(lambda: (found := _ask(f"{ray}vllm"))["status"] in ended and found)
    assert state["status"] == "SUCCEEDED", state
    words, variables = json.loads((tmp_path / "said").read_text())
    assert words == list(plan[1][0].command.words[1:])
    assert words[1] == hostile
    assert job["runtime_env"]["env_vars"].items() <= variables.items()
    assert variables["VLLM_HOST_IP"] == "127.0.0.1"  # as Ray was started, not the plan's
