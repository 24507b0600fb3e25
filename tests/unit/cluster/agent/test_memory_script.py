"""End a rank by its control group, with the words why; read such a record from a hostile disk."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patchkit.cluster.agent import memory_script
from patchkit.cluster.agent.memory_record import (
    BOOT,
    last_figures,
    open_record,
    put_record,
    read_stop,
    record_path,
)
from patchkit.cluster.agent.memory_script import (
    MemoryGuard,
    ProcessSize,
    ProcessSizes,
    describe_growth,
)

GIB = 1 << 20  # in KiB
EVERYTHING = 1 << 20  # GiB: always more than is left
HOG = "import sys, time; kept = bytearray(b'x') * (300 << 20); print(1, flush=True); time.sleep(99)"
STOP = {"start": "a", "time": 1.0, "text": "b", "missing": 2.0, "after": ""}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    mask = os.umask(0o002)
    yield tmp_path
    os.umask(mask)


@pytest.fixture
def group(monkeypatch):
    """A control group of its own, in which the guard finds the rank."""
    tops = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
    top = next((top for top in tops if (top / "cgroup.controllers").exists()), None)
    if top is None or not os.access(top, os.W_OK):
        pytest.skip("no control group of version 2 can be made here (root)")
    path = top / f"patchkit-test-{os.getpid()}"
    path.mkdir()
    monkeypatch.setattr(memory_script, "find_groups", lambda _settings: [path])
    yield path
    deadline = time.monotonic() + 5
    while (path / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    path.rmdir()


def rank_in(group, *words):
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    (group / "cgroup.procs").write_text(str(process.pid))
    return process


def guard_with(floor):
    return MemoryGuard({"name": "x", "unit": "x.service", "id": "abc", "floor": floor})


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_rank_is_ended_below_the_floor_and_never_above_it(
    group, monkeypatch, capsys, is_writable
):
    """With a list of processes alone, as for docker's containers, each of them gets SIGKILL."""
    if not is_writable:
        monkeypatch.setattr(memory_script.os, "open", without(os.open, "cgroup.kill"))
    with rank_in(group, "sleep", "99") as rank, rank_in(group, "sleep", "99") as other:
        guard = guard_with(0.001)
        for _ in range(3):
            guard.look()
        assert (rank.poll(), other.poll(), read_stop("x")) == (None, None, None)

        guard.floor = guard.mark = EVERYTHING * GIB
        guard.look()
        assert (rank.wait(5), other.wait(5)) == (-9, -9)
        stop = read_stop("x")
        assert "GiB left, memory_floor is 1048576.0" in stop.text
        assert stop.text in capsys.readouterr().out
        assert (stop.start, stop.missing > 1 << 19) == ("abc", True)

        guard.look()  # what has ended is ended once
        assert read_stop("x") == stop
    mode = record_path("x", "json").stat().st_mode
    assert (
        stat.S_IMODE(mode),
        record_path("x", "json").parent.stat().st_mode & 0o77,
    ) == (0o600, 0)


def without(open_file, name):
    """Return an `open` that is refused a file of this name, as a user is one of root's."""

    def refuse(path, *more):
        if Path(path).name == name:
            raise PermissionError
        return open_file(path, *more)

    return refuse


def test_another_group_of_the_same_name_is_the_next_start(group):
    """systemd removes the group of a unit that ended, and makes one for its next start."""
    guard = guard_with(EVERYTHING)
    guard._find_groups()
    group.rmdir()
    group.mkdir()
    with rank_in(group, "sleep", "99") as rank:
        guard.look()
        assert rank.poll() is None
        guard._looked_at = 0.0
        guard.look()
        guard.look()
        assert rank.wait(5) == -9


def test_figures_are_on_the_disk_and_say_that_systemd_ended_the_guard():
    guard = guard_with(0.001)
    guard.look()
    guard.finish()
    moment, left, has_ended = last_figures("x", BOOT.read_text().strip())
    assert abs(moment - time.time()) < 5
    assert (left > 0, has_ended) == (True, True)


def test_the_one_who_grew_is_named(group):
    guard = guard_with(0.001)
    guard.look_at_processes(guard.read_memory())
    guard.look_at_processes(guard.read_memory())
    with rank_in(group, sys.executable, "-c", HOG) as hog:
        hog.stdout.readline()
        guard.look_at_processes(guard.read_memory())
        text = describe_growth(guard._looks[0], guard._looks[-1])
        hog.kill()
    assert (
        f"(process {hog.pid} of {memory_script._user_names()[os.getuid()]}) grew by 0.3"
        in text
    )


@pytest.mark.parametrize(
    ("left", "sizes", "text"),
    [
        (2, {9: 1, 10: 6}, "vllm (process 10 of root) grew by 5.0 GiB in 8 s"),
        (2, {9: 1, 10: 2}, "memory of no process, as a GPU's, grew by 7.0 GiB in 8 s"),
        (10, {9: 1, 10: 1}, "no process grew"),
        (12, {}, "no process grew"),
    ],
)
def test_growth_is_of_a_process_or_of_none(left, sizes, text):
    def rows(sizes):
        return {pid: ProcessSize(gib * GIB, "vllm", 0) for pid, gib in sizes.items()}

    before = ProcessSizes(1.0, 10 * GIB, rows({9: 1, 10: 1}))
    assert describe_growth(before, ProcessSizes(9.0, left * GIB, rows(sizes))) == text


@pytest.mark.parametrize(
    "content",
    [
        "",
        json.dumps(STOP)[:-9],  # the guard was killed while it wrote
        json.dumps({**STOP, "time": float("nan")}),
        json.dumps({**STOP, "missing": -1}),
        json.dumps({**STOP, "time": ["b"]}),
        "[" * 4000,
        "[]",
    ],
)
def test_a_record_of_another_form_is_none(content):
    put_record(open_record("x", "json"), content.encode())
    assert read_stop("x") is None


def test_a_record_says_no_more_than_a_line(home):
    lines = {**STOP, "start": "a\x1b]0;b\x07\n"}
    put_record(open_record("x", "json"), json.dumps(lines).encode())
    assert read_stop("x").start == "a]0;b"

    path = record_path("x", "json")
    (home / "other").write_text(json.dumps(STOP))
    for make in (
        lambda: os.mkfifo(path),
        lambda: path.symlink_to(home / "other"),
        path.mkdir,
    ):
        path.unlink()
        make()
        assert read_stop("x") is None
