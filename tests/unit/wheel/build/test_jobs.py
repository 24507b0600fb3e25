"""As many jobs as cores and memory allow; no network inside a build."""

from __future__ import annotations

import subprocess
import sys

import pytest

from patchkit.units import BYTES_PER_GIB
from patchkit.wheel.build import machine as module
from patchkit.wheel.build.machine import jobs_for, namespace_words


@pytest.mark.parametrize(
    ("cores", "free", "number", "decides"),
    [
        (20, 110, 20, "one a core"),
        (20, 43, 10, "memory decides"),
        (2, 8, 2, "one a core"),
        (2, 3, 1, "memory decides"),
        (1, 0, 1, "one a core"),
    ],
)
def test_jobs(monkeypatch, tmp_path, cores, free, number, decides):
    (tmp_path / "meminfo").write_text(
        f"MemTotal: 1 kB\nMemAvailable: {free * BYTES_PER_GIB >> 10} kB\n"
    )
    monkeypatch.setattr(module, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _process: set(range(cores)))
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
