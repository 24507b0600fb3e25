"""Check what units run: compiled code that goes to a worker, by a real rsync."""

import errno
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from patchkit.cluster.agent import memory_record
from patchkit.cluster.agent.group_script import (
    ALONE,
    SMALLER,
    ended,
    keep_cache,
    spread,
)
from patchkit.cluster.agent.memory_record import (
    MemoryStop,
    encode_stop,
    read_stop,
    record_path,
    write_stop,
)
from patchkit.cluster.launch.units import node_scripts
from support import write_files
from support.local_server import LocalServer, QuietHandler
from support.needed import need

TOTAL_GIB = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
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


STOP = MemoryStop(start="1", time=time.time() + 86400, text="1.9 GiB left", missing=2.0)
KV = "--kv-cache-memory-bytes"
SHARE = "--gpu-memory-utilization"


@pytest.fixture
def head(tmp_path, monkeypatch):
    """A head whose guard can leave records; systemctl keeps what it was asked for."""
    write_files(tmp_path, {"systemctl": SYSTEMCTL}, mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(SMALLER, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "asked").touch()
    unit = "patchkit-vllm.service"
    return {
        "id": "1",
        "name": "vllm",
        "unit": unit,
        "cache": (KV, 9e9, [(0.0, "")]),
        "workers": {},
    }


@pytest.mark.parametrize(
    ("cache", "smaller"),
    [
        ((KV, 9e9, [(0.0, "")]), f"{KV} {int(9e9) - (2 << 30)}"),
        ((SHARE, 0.8, [(8e9, " -l 9")]), f"{SHARE} {0.8 - 2 / TOTAL_GIB:.3f}"),
        # Less than the longest context takes: a shorter one, if it is worth a start.
        (
            (KV, 9e9, [(8e9, " -l 9"), (6e9, " -l 8"), (5e9, " -l 7")]),
            f"{KV} {int(9e9) - (2 << 30)} -l 8",
        ),
        ((KV, 9e9, [(8e9, " -l 9")]), ""),
        ((KV, 2e9, [(0.0, "")]), ""),  # all of it was missing
        (("", 0.0, []), ""),
    ],
)
def test_a_start_after_a_kill_for_memory_takes_less_once(
    head, monkeypatch, cache, smaller
):
    head["cache"] = cache
    write_stop("vllm", STOP)
    ended(head)
    env = record_path("vllm", "env")
    assert env.exists() == bool(smaller)
    if smaller:
        assert env.read_text() == f"{SMALLER}={smaller}\nPATCHKIT_MISSING=2.0\n"
    asked = Path("asked").read_text
    stays = "--user stop --no-block patchkit-vllm.service\n"
    assert asked() == ("" if smaller else stays)
    after = read_stop("vllm", "1").after
    assert (smaller or "it stays down") in after

    ended(head)  # another crash follows: the kill is dealt with
    assert (asked(), read_stop("vllm", "1").after) == ("" if smaller else stays, after)

    write_stop("vllm", replace(STOP, time=STOP.time + 1))
    monkeypatch.setenv(SMALLER, "what the unit read")
    ended(head)
    assert asked().endswith(stays)
    assert env.exists() == bool(smaller)  # a boot takes it again


def test_a_kill_is_dealt_with_on_a_full_disk(head, monkeypatch, capsys):
    """It stays down, since no smaller cache can be written; the planned one needs no room."""
    write_stop("vllm", STOP)
    monkeypatch.setattr(memory_record, "put_record", fill_disk)
    ended(head)
    stays = "it stays down: [Errno 28] No space left on device; `patchkit up` starts it"
    assert stays in capsys.readouterr().out
    assert "stop --no-block patchkit-vllm.service" in Path("asked").read_text()

    assert keep_cache(head, 0.0) == ""  # nothing was there
    write_files(record_path("vllm", "").parent, {record_path("vllm", "env"): "X=1\n"})
    assert keep_cache(head, 0.0) == ""
    assert not record_path("vllm", "env").exists()


def fill_disk(*_args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "stop", [None, replace(STOP, start="2"), replace(STOP, time=9.0)]
)
def test_an_end_that_was_not_for_memory_changes_nothing(head, stop):
    if stop:
        write_stop("vllm", stop)
    ended(head)
    assert not record_path("vllm", "env").exists()
    assert read_stop("vllm", stop.start if stop else "1") == stop


def test_the_head_knows_of_a_kill_on_a_worker_and_its_start_tells_all(
    head, monkeypatch
):
    words = encode_stop(STOP).decode()
    link = "#!/bin/sh\necho $* >> links\necho patchkit-rank: started\nsleep 0.2\n"
    write_files(Path(), {"link": f"{link}echo 'patchkit-rank: {words}'\n"}, mode=0o755)
    head["workers"]["1"] = {"node": "spark2", "ssh": ["./link"]}
    write_files(Path(), {**node_scripts(), "group.json": json.dumps(head)})
    monkeypatch.setenv("PATCHKIT_MISSING", "2.0")
    watches = [sys.executable, ALONE, "group.py", "watch", "1"]
    done = subprocess.run(watches, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("spark2: 1.9 GiB left\n"), done.stderr
    stop = read_stop("vllm", "1")
    assert stop == replace(STOP, text="spark2: 1.9 GiB left", time=stop.time)
    assert Path("links").read_text().endswith("group.py hold 1 2.0\n")
    ended(head)
    assert "the next start takes 2.0 GiB less" in read_stop("vllm", "1").after


WAIT = """#!/bin/sh
echo "$*" >> asked
case "$*" in
    *StatusText*) echo "the start waits for memory: 3 GiB are left" ;;
    *" start "*) until grep -q " stop " asked; do sleep 0.1; done ;;
esac
"""


@pytest.mark.parametrize(("word", "status"), [("", 1), ("stop\n", 0)])
def test_a_rank_that_waits_for_memory_says_so_and_ends_with_its_head(
    head, word, status
):
    write_files(Path(), {**node_scripts(), "group.json": json.dumps(head)})
    write_files(Path(), {"systemctl": WAIT}, mode=0o755)
    words = [sys.executable, ALONE, "group.py", "held"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as held:
        waits = next(line for line in held.stdout if "waits" in line)
        assert (
            waits
            == "patchkit-rank: waits: the start waits for memory: 3 GiB are left\n"
        )
        output, _ = held.communicate(word, timeout=20)
    assert (held.returncode, "started" in output) == (status, False)
    assert Path("asked").read_text().endswith("--user stop patchkit-vllm.service\n")


def test_the_head_tells_what_a_worker_waits_for(head, monkeypatch):
    """Its answer is a sign of life for the worker; what is told has a bound."""
    waits = "echo patchkit-rank: waits: no memory $(printf %07000d 0)"
    link = f"#!/bin/sh\n{waits}\nread sign && echo patchkit-rank: started\n"
    write_files(Path(), {"link": link}, mode=0o755)
    head["workers"]["1"] = {"node": "spark2", "ssh": ["./link"]}
    write_files(Path(), {**node_scripts(), "group.json": json.dumps(head)})
    watches = [sys.executable, ALONE, "group.py", "watch", "1"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("systemd")
        monkeypatch.setenv("NOTIFY_SOCKET", "systemd")
        done = subprocess.run(watches, capture_output=True, text=True, timeout=60)
        states = [systemd.recv(1 << 16).decode() for _ in range(2)]
    assert "rank 1 is started" in done.stdout, done.stderr
    assert states == [f"STATUS=spark2: no memory {'0' * 590}", "READY=1\nSTATUS="]


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
