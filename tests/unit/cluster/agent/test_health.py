"""Read the health of this very machine: whatever it is, what cannot be read has a reason."""

import os
import subprocess
import sys
from dataclasses import fields

import pytest

from patchkit.cluster.agent.health import (
    Compilers,
    NodeHealth,
    collect_health,
    container_limits,
    find_compilers,
    process_limits,
)
from patchkit.cluster.ssh.node import Remote
from support import write_files


def test_this_machine():
    given = {"venv": sys.prefix, "unit": "nobody.service"}
    health = Remote("localhost").call(NodeHealth, collect_health, **given)
    facts = {each.name for each in fields(NodeHealth)}
    assert all(health.unread.values())
    assert "unit" in health.unread
    unknown = {name for name in facts if getattr(health, name) is None}
    assert unknown == {*health.unread}
    assert health.page_cache is not None
    assert (
        0
        <= health.page_cache
        < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 10
    )
    assert health.container is not None


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({".dockerenv": ""}, "docker"),
        # A machine of its own, with a systemd that starts the ranks.
        ({"run/systemd/container": "systemd-nspawn\n"}, ""),
        (
            {"proc/1/cgroup": "0::/kubepods.slice/cri-containerd-1.scope\n"},
            "kubernetes",
        ),
        ({"run/.containerenv": ""}, "podman"),
    ],
)
def test_kinds_of_containers(tmp_path, files, kind):
    assert container_limits(write_files(tmp_path, files)).kind == kind


def test_the_limit_of_locked_memory_and_the_capability_to_pass_it(tmp_path):
    code = "import resource as r, time; r.setrlimit(r.RLIMIT_MEMLOCK, (4096, 4096));"
    words = (sys.executable, "-c", f"{code} print(flush=True); time.sleep(60)")
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        for word, may in (("0000000000004000", True), ("00000000a80425fb", False)):
            status = {f"proc/{process.pid}/status": f"Name:\tx\nCapEff:\t{word}\n"}
            found = process_limits(process.pid, write_files(tmp_path, status))
            assert (found.memlock, found.locks) == (4096, may)
        process.kill()


def test_compilers_are_those_of_the_variables(tmp_path):
    header = "venv/include/python3.12/Python.h"
    write_files(
        tmp_path, {"tools/cc": "", "venv/bin/python": "", header: ""}, mode=0o755
    )
    (tmp_path / "venv/lib/python3.12").mkdir(parents=True)
    found = find_compilers(tmp_path / "venv", {"PATH": str(tmp_path / "tools")})
    assert found == Compilers(
        compiler=f"{tmp_path}/tools/cc", python_h=f"{tmp_path}/{header}"
    )
