"""Read the health of this very machine: whatever it is, what cannot be read has a reason."""

import os
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


def test_the_capability_to_lock_memory(tmp_path):
    limit = "Limit\nMax locked memory         8388608              8388608              bytes\n"
    for word, may in (("0000000000004000", True), ("00000000a80425fb", False)):
        status = f"Name:\tx\nCapEff:\t{word}\n"
        write_files(tmp_path, {"proc/self/limits": limit, "proc/self/status": status})
        found = process_limits("self", tmp_path)
        assert (found.memlock, found.locks) == (8 << 20, may)


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
