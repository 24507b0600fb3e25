"""End what runs on a node with its asker; one that is silent is as good as gone."""

import json
import os
import subprocess
import sys

import pytest

from patchkit.cluster.agent.node_files import hold_alone
from patchkit.errors import BusyError

ANSWER = """\
from patchkit.cluster.ssh import answer
answer.LEASE = {lease}
answer.answer(["patchkit.cluster.agent.node_files", "hold_alone", {{"name": "x"}}], "mark ")
"""


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Start what holds the cluster x for an asker; it is silent after so many seconds."""
    monkeypatch.setenv("HOME", str(tmp_path))
    processes = []

    def start(lease):
        process = subprocess.Popen(
            [sys.executable, "-c", ANSWER.format(lease=lease)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "SSH_CONNECTION": "192.0.2.7 5 192.0.2.1 22"},
            text=True,
        )
        processes.append(process)
        for line in process.stdout:
            if json.loads(line.removeprefix("mark ")) == {"part": True}:
                return process
        raise AssertionError("it does not hold the cluster")

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_lock_is_lost_when_its_asker_is_silent(started):
    """Standard input stays open, as behind a connection that nobody has ended."""
    process = started(lease=0.3)
    process.wait(10)
    assert next(hold_alone("x")) is True


def test_who_holds_the_lock_is_said(started):
    process = started(lease=60)
    with pytest.raises(BusyError) as caught:
        next(hold_alone("x"))
    assert f"'x': process {process.pid}, from 192.0.2.7, since " in caught.value.what


def test_an_asker_that_beats_keeps_the_lock(started):
    process = started(lease=0.4)
    for _ in range(6):
        process.stdin.write("\n")
        process.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
