"""Connections are shared only in a folder that nobody else can enter or replace."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from patchkit.cluster.ssh.ssh import sharing
from support.needed import need

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to another user: root")
NOBODY = 65534


@pytest.fixture
def home(monkeypatch):
    need("ssh")
    # Shorter than pytest's own, since a socket's address is short.
    home = Path(tempfile.mkdtemp(dir="/tmp"))
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    home.chmod(0o755)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    sharing.cache_clear()
    yield home
    sharing.cache_clear()
    shutil.rmtree(home)


def shared():
    return [word for word in sharing("spark-1") if word.startswith("ControlPath")]


def test_without_a_runtime_folder_it_lies_beside_the_keys(home):
    assert shared() == [f"ControlPath={home}/.ssh/patchkit-ssh/%C"]
    assert (home / ".ssh/patchkit-ssh").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda home: os.chown(home, NOBODY, NOBODY), id="another's parent"),
        pytest.param(lambda home: (home / ".ssh").chmod(0o770), id="a group's parent"),
        pytest.param(lambda home: (home / ".ssh/patchkit-ssh").mkdir(), id="open to others"),
        pytest.param(
            lambda home: (home / ".ssh/patchkit-ssh").symlink_to("/run"), id="a link to elsewhere"
        ),
        pytest.param(lambda home: (home / ".ssh").rmdir(), id="none"),
    ],
)
def test_a_folder_that_others_may_reach_is_not_taken(home, change):
    change(home)
    assert shared() == []
    assert not (home / ".ssh/patchkit-ssh/%C").exists()


def test_a_runtime_folder_of_somebody_else_is_not_taken(home, monkeypatch):
    runtime = home / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert shared() == [f"ControlPath={runtime}/patchkit-ssh/%C"]
    sharing.cache_clear()
    os.chown(runtime, NOBODY, NOBODY)
    assert shared() == []
