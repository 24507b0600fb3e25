"""Put, end and describe a group on a node whose systemd and engine are stand-ins."""

import json
import os
import subprocess
import sys
import time
from venv import EnvBuilder

import pytest

from patchkit.cluster.agent.memory_record import BOOT, record_path, write_record
from patchkit.cluster.agent.node_facts import look_at_node
from patchkit.cluster.agent.node_files import put_files
from patchkit.cluster.agent.node_state import (
    end_group,
    end_start,
    look_at_served,
    memory_to_come,
    read_node_state,
)
from patchkit.cluster.agent.processes import strangers
from patchkit.cluster.launch.cluster_file import ClusterFile, ClusterNode
from patchkit.units import KIB_PER_GIB
from support import flashinfer, write_files
from support.needed import need

UNIT = "patchkit-x.service"
HEAD = "[Install]\nWantedBy=default.target\n"
SHOWN = f"Id={UNIT}\\nActiveState=inactive\\nSubState=dead\\nNRestarts=0\\n"
SYSTEMCTL = f"""\
#!/bin/sh
shift
echo "$@" >> {{folder}}/asked
case $1 in show) printf '{SHOWN}';; esac
"""
LISTENS = """\
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Stand in for systemctl: what it was asked for."""
    programs = {
        "systemctl": SYSTEMCTL.format(folder=tmp_path),
        "dmesg": "#!/bin/sh\n",
        "journalctl": "#!/bin/sh\n",
    }
    write_files(tmp_path / "bin", programs, mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "asked").touch()
    return lambda: (tmp_path / "asked").read_text().splitlines()


def write_settings(folder, name, **settings):
    file = {"group.json": json.dumps({"name": name, **settings})}
    write_files(folder / ".config/patchkit" / name, file)


@pytest.mark.parametrize(("text", "disabled"), [(HEAD, False), ("[Unit]\n", True)])
def test_a_node_that_is_the_head_no_more_starts_nothing_at_a_boot(
    asked, text, disabled
):
    """It may have been the head of the former start, whose unit is enabled."""
    put_files("x", {UNIT: text, "group.json": "{}"})
    assert (f"disable --quiet {UNIT}" in asked()) is disabled


def test_a_start_by_a_person_begins_with_the_planned_cache_on_each_node(asked):
    write_record("x", "json", b"{}")
    write_record("x", "env", b"PATCHKIT_MISSING=2.0")
    put_files("x", {UNIT: "[Unit]\n"})
    assert not [*record_path("x", "json").parent.iterdir()]


def test_the_end_of_a_group_leaves_no_helper_of_a_former_head(asked):
    end_group("x", [UNIT], disable=False)
    for part in ("worker@*", "memory", "alive"):
        assert f"reset-failed patchkit-x-{part}.service" in asked()
    assert not [words for words in asked() if words.startswith("disable")]


@pytest.mark.parametrize(("start", "ended"), [("abc", True), ("def", False)])
def test_a_node_that_left_the_file_ends_the_start_that_it_was_in(
    asked, tmp_path, start, ended
):
    write_settings(tmp_path, "x", id=start)
    assert end_start("x", "abc") == ""
    assert (f"disable --quiet {UNIT}" in asked()) is ended
    assert (f"stop {UNIT}" in asked()) is ended


def test_another_cluster_of_this_user_is_named_by_its_mark(asked, tmp_path):
    """`name` was changed in cluster.toml while it served."""
    need("ss")
    write_settings(tmp_path, "zzz", url="http://127.0.0.1:8000")
    words = [sys.executable, "-c", LISTENS]
    environment = {**os.environ, "PATCHKIT_CLUSTER": "zzz"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=environment, **pipes) as process:
        port = process.stdout.readline().strip()
        assert read_node_state("x", [UNIT]).others["zzz"] is True
        assert "zzz" not in read_node_state("zzz", [UNIT]).others
        url = f"http://127.0.0.1:{port}"
        (listener,) = strangers(url, UNIT, "x")
        assert listener.endswith(f"(process {process.pid}) of the cluster zzz")
        assert strangers(url, UNIT, "zzz") == []
        process.stdin.close()


@pytest.mark.parametrize(
    ("turn", "sub", "gib"),
    [
        ((70, 600), "start-post", 30),  # 100 GiB are left
        ((95, 600), "start-post", 5),
        ((10, 600), "start-post", 40),  # others took it
        ((70, -1), "start-post", 0),  # of a guard that is long gone
        (None, "auto-restart", 40),
        (None, "running", 0),
    ],
)
def test_a_model_that_loads_has_yet_to_take_memory(asked, tmp_path, turn, sub, gib):
    systemctl = tmp_path / "bin/systemctl"
    systemctl.write_text(systemctl.read_text().replace("dead", sub))
    write_settings(tmp_path, "chat", memory={"takes": 40.0, "free": 0.0})
    if turn:
        left, seconds = turn
        line = f"turn={left * KIB_PER_GIB},{time.monotonic() + seconds:.0f}\n"
        write_record("chat", BOOT.read_text().strip(), line.encode())
    assert memory_to_come(["chat"], 100 * KIB_PER_GIB) == gib

    # Files of an earlier patchkit, or of a hostile disk, say nothing.
    for plan in (None, [], {"takes": "x"}):
        write_settings(tmp_path, "chat", memory=plan)
        assert memory_to_come(["chat"], 100 * KIB_PER_GIB) == 0


def test_an_image_that_is_gone_while_it_serves_is_a_problem(tmp_path, monkeypatch):
    info = json.dumps({"ServerVersion": "28.3", "DockerRootDir": str(tmp_path)})
    programs = {
        "docker": f"#!/bin/sh\n[ $1 = info ] && echo '{info}'\n",
        "systemd-run": '#!/bin/sh\nshift 5\nexec "$@"\n',
    }
    write_files(tmp_path, programs, mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    settings = {"inside": ["docker", "exec", "patchkit-x"], "image": "0" * 64}
    successor, image = look_at_served(settings)
    assert (successor, image.problem) == ("", "image-missing")


def test_a_start_names_the_environment_and_not_the_link_to_it(asked, tmp_path):
    """Another `install` moves the link: what serves is restarted from where it was."""
    venvs = tmp_path / ".local/share/patchkit/venvs"
    (venvs / "abc/bin").mkdir(parents=True)
    (venvs / "abc/bin/python").symlink_to(sys.executable)
    (tmp_path / "venv").symlink_to(venvs / "abc")
    facts = look_at_node("x", "~/venv")
    assert (facts.venv, facts.installation) == (str(venvs / "abc"), "abc")
    (tmp_path / "venv").unlink()
    (tmp_path / "venv").symlink_to(venvs / "def")
    served = {"link": str(tmp_path / "venv"), "venv": facts.venv}
    told = "def is installed, and abc serves until the next `up`"
    assert look_at_served(served) == (told, None)


def test_kernels_of_ranks_are_those_in_their_own_folder(asked, tmp_path):
    """The user's PATH and cache are not those of ranks, which units set."""
    venv = tmp_path / "venv"
    EnvBuilder(symlinks=True).create(venv)
    (site,) = venv.glob("lib/python3*/site-packages")
    flashinfer.install(site, "flashinfer-python", "0.6.13")
    flashinfer.install(site, "vllm", "0.25.1")
    write_files(site / "vllm", {"__init__.py": ""})
    write_files(venv / "bin", {"ninja": ""}, mode=0o755)

    folder = tmp_path / ".local/state/patchkit/vllm-0.25.1/flashinfer"
    flashinfer.compile_into(folder, "0.6.13", "121a", "sampling")
    flashinfer.compile_into(tmp_path, "0.6.13", "121a", "rope")

    variables = ClusterFile(members=(ClusterNode(ssh="x"),)).rank_variables
    kernels = look_at_node("x", "~/venv", variables=variables).host.software.flashinfer
    assert kernels.modules == ("sampling",)
    assert kernels.facts["ninja"] == f"{venv}/bin/ninja"

    kernels = look_at_node("x", "~/venv").host.software.flashinfer
    assert kernels.modules == ("rope",)


def test_a_user_without_a_name_is_its_number(asked, monkeypatch):
    """A container may run as any number: `docker run --user 12345`."""
    monkeypatch.setattr(os, "getuid", lambda: 3_999_999_999)
    assert look_at_node("x", "~/venv").user == "3999999999"
    assert look_at_node("x", "~no-such-user/venv").venv == ""
