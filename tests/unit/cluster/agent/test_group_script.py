"""Check what units run: compiled code that goes to a worker, by a real rsync."""

import json
import os
import subprocess
import sys
import time

import pytest

from patchkit.cluster.agent.group_script import ALONE, spread
from patchkit.cluster.launch.units import node_scripts
from support import write_files
from support.local_server import LocalServer, QuietHandler
from support.needed import need

GRAPH = "models/m/vllm/torch_compile_cache/torch_aot_compile/H/inductor_cache/fxgraph/g"
# Stands for ssh: the worker is another home.
SSH = '#!/bin/sh\ncd worker\nwhile [ "$1" != rsync ]; do shift; done\nexec "$@"\n'


def test_a_worker_gets_what_it_lacks_and_keeps_what_it_has(
    tmp_path, monkeypatch, capsys
):
    need("rsync")
    head, worker, own = (
        tmp_path / "a head",
        tmp_path / "worker",
        {"cuda/index": "its own"},
    )
    given = {"triton/K/k.cubin": "head's", GRAPH: "graph", "cuda/a/b": "code"}
    not_given = {
        "models/m/vllm/startup_plan/p": "rank 0's",
        "triton/new": "half written",
    }
    write_files(head / "caches", {**given, **not_given, "cuda/index": "head's"})
    (head / "caches/triton/link").symlink_to(
        write_files(tmp_path / "other", {"secret": "x"})
    )
    write_files(worker / "caches", own)
    write_files(tmp_path, {"ssh": SSH}, mode=0o755)
    for path in given:  # what was written just now may not be whole
        os.utime(head / "caches" / path, (time.time() - 99,) * 2)
    monkeypatch.setenv("HOME", str(head))
    monkeypatch.chdir(tmp_path)
    settings = {"caches": "caches", "workers": {}}
    for ssh, says in (
        ("./ssh", "3 files"),
        ("./ssh", "0 files"),
        ("/bin/false", "rsync error"),
    ):
        settings["workers"]["1"] = {
            "node": "spark-2",
            "ssh": [ssh, "--", "spark@spark-2"],
        }
        spread(settings)
        assert says in capsys.readouterr().out
    with monkeypatch.context() as without:
        without.setenv("PATH", "/nonexistent")
        spread(settings)
    assert "No such file or directory: 'rsync'" in capsys.readouterr().out

    found = [path for path in (worker / "caches").rglob("*") if path.is_file()]
    texts = {
        str(path.relative_to(worker / "caches")): path.read_text() for path in found
    }
    assert texts == {**given, **own}

    settings["workers"]["1"]["ssh"] = ["./ssh", "--", "spark@spark-2"]
    spread(settings, "0")  # no server writes now
    assert "1 files" in capsys.readouterr().out


# Stands for systemctl: the head's unit serves, and what is asked for is kept.
SYSTEMCTL = '#!/bin/sh\necho "$@" >> asked\n[ "$2" != show ] || echo active\n'
# How a link ends, by the last words on it, and whether that counts as a failed start.
ENDINGS = {
    "client_loop: send disconnect: Broken pipe": False,
    "Connection closed by 192.168.177.2 port 22": False,
    "Timeout, server spark2 not responding.": False,
    "": False,
    "error: the rank ended": False,  # nobody but the rank's end of the link says so
    "patchkit-rank: the rank ended: success, status 0": True,
}


@pytest.mark.parametrize("words", ENDINGS)
def test_a_lost_link_is_no_failed_start_whatever_its_last_words(
    tmp_path, monkeypatch, words
):
    started = "printf 'Last login: today\\npatchkit-rank: started\\n'"
    link = f"#!/bin/sh\n{started}\nsleep 0.2\necho {words!r}\nexit 255\n"
    write_files(tmp_path, {"systemctl": SYSTEMCTL, "link": link}, mode=0o755)
    workers = {"1": {"node": "spark2", "ssh": ["./link"]}}
    settings = {
        "id": "1",
        "name": "vllm",
        "unit": "patchkit-vllm.service",
        "workers": workers,
    }
    write_files(tmp_path, {**node_scripts(), "group.json": json.dumps(settings)})
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    asked = [sys.executable, ALONE, "group.py", "watch", "1"]
    done = subprocess.run(
        asked, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    counted = "reset-failed" not in (tmp_path / "asked").read_text()
    assert (done.returncode, counted) == (1, ENDINGS[words]), done.stderr
    assert words.removeprefix("patchkit-rank: ") in done.stdout


@pytest.mark.parametrize("verb", ["begin", "ready"])
def test_a_server_whose_rank_has_ended_is_not_waited_for(tmp_path, monkeypatch, verb):
    """A rank that ends before the server's process is there finds nothing to take along."""
    failed = SYSTEMCTL.replace("active", "failed")
    write_files(tmp_path, {"systemctl": failed}, mode=0o755)
    settings = {
        "workers": {"1": {}},
        "unit": "patchkit-vllm.service",
        "url": "http://127.0.0.1:1",
    }
    write_files(tmp_path, {**node_scripts(), "group.json": json.dumps(settings)})
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    words = [sys.executable, ALONE, "group.py", verb]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    assert "error: patchkit-vllm-worker@1.service does not run" in done.stdout


class Stranger(QuietHandler):
    """Answers like a server that has loaded, and keeps what it was asked, with which key."""

    def do_GET(self):
        self.server.seen.append((self.path, self.headers["Authorization"]))
        self.send(200, b'{"data": [{"id": "m"}]}')

    do_POST = do_GET


def test_no_key_goes_to_another_program_at_the_servers_port(tmp_path, monkeypatch):
    """From the start of the server until it listens, anybody can listen there."""
    need("ss")
    with LocalServer(Stranger) as stranger:
        stranger.seen = []
        settings = {
            "workers": {},
            "name": "vllm",
            "unit": "patchkit-vllm.service",
            "url": stranger.url,
        }
        write_files(tmp_path, {**node_scripts(), "group.json": json.dumps(settings)})
        monkeypatch.setenv("VLLM_API_KEY", "sk-CANARY")
        words = [sys.executable, ALONE, "group.py", "ready"]
        done = subprocess.run(
            words, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 1, done.stderr
    assert "error: the server's port is taken: 127.0.0.1 port" in done.stdout
    assert stranger.seen == [("/health", None)]
