"""The folder where builds happen, private and held by one; jobs by cores and memory; no network."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patchkit.errors import BusyError, StorageError
from patchkit.units import BYTES_PER_GIB
from patchkit.wheel.build import machine
from patchkit.wheel.build import machine as module
from patchkit.wheel.build.machine import jobs_for, namespace_words, staging, work_folder
from support import read_files, write_files


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Where builds happen in these tests; not made yet."""
    place = tmp_path / "work"
    monkeypatch.setattr(module, "WORK", place)
    return place


@contextlib.contextmanager
def build_folder(text="1", facts="facts", name="nccl", *, fresh=False):
    """Hold a work folder, with sources that say ``text``."""
    with staging() as staged:
        brought = [write_files(staged / "source", {"text": text})]
        with work_folder(
            module.WORK / name, brought, facts, fresh=fresh, free=0
        ) as root:
            yield root


def wait_for_removal(folder):
    """Return whether a folder is gone within 10 s: a process of its own removes it."""
    for _ in range(100):
        if not folder.exists():
            return True
        time.sleep(0.1)
    return False


def test_nobody_waits_until_staged_files_are_removed_after_an_interrupt(work):
    staged = Path()

    def interrupted():
        nonlocal staged
        with staging() as staged:
            (staged / "tree").mkdir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert wait_for_removal(staged)


def test_a_first_build_and_one_of_other_facts_which_clear_it(work, tmp_path):
    with build_folder() as root:
        assert read_files(work / "nccl") == {
            "source/text": b"1",
            "facts.json": b"facts",
        }
        write_files(root / "build", {"a.o": ""})
        (root / "link").symlink_to(tmp_path)
    staged = [path for path in work.iterdir() if path.name != "nccl"]
    assert all(map(wait_for_removal, staged))
    (tmp_path / "precious").write_text("kept")
    with build_folder(text="2", facts="others") as root:
        assert read_files(root) == {"source/text": b"2", "facts.json": b"others"}
        assert not (root / "link").is_symlink()
    assert (tmp_path / "precious").read_text() == "kept"


@pytest.mark.usefixtures("work")
def test_two_at_once():
    """What a build has started holds the folder too, when patchkit alone was killed."""
    with build_folder():
        with pytest.raises(BusyError) as busy, build_folder(fresh=True):
            pass
        with build_folder(name="other"):
            pass
        assert busy.value.exit_code == 6
        command = [sys.executable, "-c", "input()"]
        left = subprocess.Popen(command, stdin=subprocess.PIPE, close_fds=False)
    with pytest.raises(BusyError), build_folder():
        pass
    left.communicate(b"\n")
    with build_folder():
        pass


# Others must not be able to put anything there


def make_shared(place, _elsewhere):
    place.mkdir()
    place.chmod(0o1777)


def give_away(place, _elsewhere):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    place.mkdir()
    os.chown(place, 12345, 12345)


def link(place, elsewhere):
    elsewhere.mkdir(mode=0o700)
    place.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "spoil",
    [
        *(make_shared, give_away, link),
        lambda place, elsewhere: place.symlink_to(elsewhere),
    ],
)
@pytest.mark.parametrize("inner", [False, True])
def test_a_folder_that_is_not_ours_alone(work, tmp_path, spoil, inner):
    if inner:
        work.mkdir(mode=0o700)  # with umask 0002 it would be the group's as well
    place = work / "nccl" if inner else work
    elsewhere = tmp_path / "elsewhere"
    spoil(place, elsewhere)
    before = place.lstat().st_mode
    with pytest.raises(StorageError, match=str(place)), build_folder():
        pass
    assert place.lstat().st_mode == before
    assert not elsewhere.exists() or list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("cores", "free", "number", "decides"),
    [
        (20, 110, 20, "one a core"),
        (20, 43, 10, "memory decides"),
        (2, 3, 1, "memory decides"),
        (1, 0, 1, "one a core"),
    ],
)
def test_jobs(monkeypatch, tmp_path, cores, free, number, decides):
    (tmp_path / "meminfo").write_text(
        f"MemTotal: 1 kB\nMemAvailable: {free * BYTES_PER_GIB >> 10} kB\n"
    )
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(
        machine.os, "sched_getaffinity", lambda _process: set(range(cores))
    )
    found = jobs_for(4 * BYTES_PER_GIB)
    assert found.number == number
    assert found.reason == f"{decides}: {cores} cores, 4 GiB a job, {free} available"


def test_a_build_has_no_network():
    if not namespace_words():
        pytest.skip("this machine lets nobody make network namespaces")
    # Loopback alone is there, and it is down.
    code = "import socket; print(sorted(name for _, name in socket.if_nameindex()))"
    command = [*namespace_words(), sys.executable, "-c"]
    done = subprocess.run([*command, code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['lo']"
    code = "import socket; socket.create_connection(('127.0.0.1', 9), timeout=5)"
    done = subprocess.run([*command, code], capture_output=True, text=True)
    assert "Network is unreachable" in done.stderr
