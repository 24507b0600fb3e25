"""End what runs on a node with its asker; one that is silent is as good as gone."""

import json
import subprocess
import sys

import pytest

from patchkit.cluster.agent.node_files import hold_alone

ANSWER = """\
from patchkit.cluster.ssh import answer
answer.LEASE = 0.4
answer.answer(["patchkit.cluster.agent.node_files", "hold_alone", {"name": "x"}], "mark ")
"""


def test_a_lock_is_kept_while_its_asker_beats_and_lost_when_it_is_silent(tmp_path, monkeypatch):
    """Standard input stays open, as behind a connection that nobody has ended."""
    monkeypatch.setenv("HOME", str(tmp_path))
    words = [sys.executable, "-c", ANSWER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as process:
        while json.loads(process.stdout.readline().removeprefix("mark ")) != {"part": True}:
            pass
        for _ in range(6):
            process.stdin.write("\n")
            process.stdin.flush()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
        process.wait(10)
        assert next(hold_alone("x")) is True
