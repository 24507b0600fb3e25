"""End what runs on a node with its asker; one that is silent is as good as gone."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from patchkit.cluster.agent.node_files import hold_alone

ANSWER = """\
from patchkit.cluster.ssh import answer
answer.LEASE = {lease}
answer.answer(["patchkit.cluster.agent.node_files", "hold_alone", {{"name": "x"}}], "mark ")
"""


@contextlib.contextmanager
def holder(home, lease):
    """Start what holds the cluster x for an asker; it is given up after so many seconds."""
    words = [sys.executable, "-c", ANSWER.format(lease=lease)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env={**os.environ, "HOME": str(home)}, **pipes) as process:
        while json.loads(process.stdout.readline().removeprefix("mark ")) != {"part": True}:
            pass
        yield process
        process.kill()


def test_a_lock_is_lost_when_its_asker_is_silent(tmp_path, monkeypatch):
    """Standard input stays open, as behind a connection that nobody has ended."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with holder(tmp_path, lease=0.3) as process:
        process.wait(10)
        assert next(hold_alone("x")) is True


def test_an_asker_that_beats_keeps_the_lock(tmp_path):
    with holder(tmp_path, lease=0.4) as process:
        for _ in range(6):
            process.stdin.write("\n")
            process.stdin.flush()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
