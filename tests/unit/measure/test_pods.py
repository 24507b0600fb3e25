"""Start what pods run: the scripts of a manifest, started as a kubelet would start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from patchkit.measure.pod_script import to_wait
from support.manifests import OPTIONS, PodGroup, manifest, planned
from support.model_server import ModelServer

FAKE = Path(__file__).parents[3] / "tests" / "e2e" / "lifecycle" / "fake_vllm.py"
SECONDS = 60


class Kubelet:
    """Starts containers of a group as processes: its folders are on this machine."""

    def __init__(self, group, folder):
        self.group, self.scripts = group, folder / "scripts"
        self.scripts.mkdir()
        for name, text in group.scripts.items():
            (self.scripts / name).write_text(text)
        programs = folder / "bin"
        programs.mkdir()
        (programs / "vllm").write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
        (programs / "vllm").chmod(0o755)
        self.path = f"{programs}:{os.environ['PATH']}"

    def start(self, rank, kind="containers", command=None, **more):
        """Start a container; ``command`` is another one in it, such as a probe's."""
        env = {"PATH": self.path, **self.group.variables(rank, kind=kind), **more}
        words = command or self.group.command(rank, kind)
        words = [each.replace("/opt/patchkit", str(self.scripts), 1) for each in words]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(words, env=env, text=True, **streams)

    def run(self, *arguments, **more):
        process = self.start(*arguments, **more)
        output, _ = process.communicate(timeout=SECONDS)
        return process.returncode, output

    def waits(self, *arguments, **more):
        """Return the first line of a container that goes on after it; it is ended here."""
        process = self.start(*arguments, **more)
        line = process.stdout.readline()
        assert process.poll() is None
        process.kill()
        process.communicate()
        return line


def _group(folder, *, port=8000, master=29501):
    """Return the pods of a manifest whose nodes are this machine."""
    (folder / "cache").mkdir()
    args = ("--master-port", str(master))
    plan = planned(folder, "openai/gpt-oss-120b", 2, port=port, args=args)
    return PodGroup(manifest(plan, replace(OPTIONS, cache=str(folder / "cache"))))


def test_a_group_answers_and_its_probe_knows(tmp_path):
    """With the fake vLLM of the failure tests, whose ranks wait for each other."""
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        port, master = one.getsockname()[1], two.getsockname()[1]
    group = _group(tmp_path, port=port, master=master)
    kubelet = Kubelet(group, tmp_path)
    head = group.container(0)
    starts, runs = (head[name]["exec"]["command"] for name in ("startupProbe", "readinessProbe"))
    for rank in (0, 1):
        assert kubelet.run(rank, "initContainers") == (0, "")
        (tmp_path / "cache" / "starts").unlink()  # each has a node of its own
    processes = [kubelet.start(0, FAKE_LOAD="0.1"), kubelet.start(0, command=starts)]
    try:
        code, said = kubelet.run(0, command=runs)
        assert (code, said[:10]) == (1, "no token: ")  # alone it waits in the rendezvous
        processes.append(kubelet.start(1, FAKE_LOAD="0.1"))
        said, _ = processes[1].communicate(timeout=SECONDS)
        assert (processes[1].returncode, "answered: " in said) == (0, True), said
        assert kubelet.run(0, command=runs) == (0, "")
    finally:
        for each in processes:
            each.terminate()
            each.communicate()


@pytest.mark.parametrize(
    ("faults", "key", "code", "says"),
    [
        ({"whole": {"choices": [{"text": "1"}]}}, "k", 0, ""),
        ({"refuse": (500, {"error": {"message": "dead"}})}, "k", 1, "500"),
        ({}, "other", 1, "401"),
    ],
)
def test_health_is_no_token(faults, key, code, says, tmp_path):
    """A server that is healthy and gives no token is not ready; its key is the Secret's."""
    with ModelServer(key="k", **faults) as server:
        group = _group(tmp_path, port=int(server.url.rpartition(":")[2]))
        probe = group.container(0)["livenessProbe"]["exec"]["command"]
        found, said = Kubelet(group, tmp_path).run(0, command=probe, VLLM_API_KEY=key)
    assert (found, says in said) == (code, True), said


def test_four_starts_an_hour():
    for ago, seconds in (
        ([], 0),
        ([5], 15),
        ([3000, 2000, 1000], 0),
        ([3000, 2000, 1000, 500], 600),
        ([4000, 3000, 2000, 1000], 0),  # the first is over an hour ago
        ([-50], 0),  # the clock was set back
    ):
        assert to_wait([1e6 - each for each in ago], 1e6, 4, 20) == seconds


def test_the_start_after_the_last_one_waits_and_a_worker_for_its_leaders_name(tmp_path):
    kubelet = Kubelet(_group(tmp_path), tmp_path)
    starts = tmp_path / "cache" / "starts"
    now = time.time()
    starts.write_text("damaged\n" + "".join(f"{now - each:.0f}\n" for each in (900, 800, 700, 600)))
    said = kubelet.waits(0, "initContainers")
    assert said.startswith("started 4 times within an hour: waiting for 2")
    starts.write_text(f"{now - 600:.0f}\n")
    assert kubelet.run(0, "initContainers") == (0, "")
    assert len(starts.read_text().split()) == 2

    starts.unlink()
    nobody = {"LWS_LEADER_ADDRESS": "vllm-0.vllm.invalid"}
    said = kubelet.waits(1, "initContainers", **nobody)
    assert said.startswith("waiting for vllm-0.vllm.invalid: ")
