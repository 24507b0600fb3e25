"""Env files on nodes made of namespaces: each node probes its own interfaces, and nothing is left.

What Ray and vLLM do with these files is `nox -s emulation`.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from e2e.emulation import wires
from e2e.emulation.files import ENV_FILE, check_strangers_file, write_files
from e2e.emulation.lab import Lab
from e2e.emulation.nodes import NodeError, obstacle
from patchkit.runtime.envfile.parse import parse
from patchkit.runtime.envfile.syntax import Format

OBSTACLE = obstacle()
pytestmark = pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE)


def _read(node):
    return parse(Format.ENV, node.file(ENV_FILE).read_text(), ENV_FILE)


def test_each_node_has_a_file_of_its_own(tmp_path):
    with Lab(tmp_path).sparks(3, "files") as sparks:
        write_files(sparks, "ray", vllm="0.32.0")
        files = [_read(spark) for spark in sparks]
    own = ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert [[file[name] for name in own] for file in files] == [
        ["192.168.100.11", "enp1s0f0np0", "enp1s0f0np0"],
        ["192.168.100.12", "enp1s0f1np1", "enp1s0f1np1"],
        ["192.168.100.13", "enp1s0f0np0", "enp1s0f0np0"],
    ]


def test_the_heads_file_is_found_out_on_a_worker(tmp_path):
    with Lab(tmp_path).sparks(2, "copied") as sparks:
        write_files(sparks, "ray", vllm="0.32.0")
        with pytest.raises(NodeError, match=r"exit status 0.*\n.*Ray listens (.|\n)*: 1 note;"):
            check_strangers_file(sparks[1])
        sparks[1].file(ENV_FILE).write_bytes(sparks[0].file(ENV_FILE).read_bytes())
        assert check_strangers_file(sparks[1]) == "env check: 4 errors, address and interfaces"


def test_what_is_sent_is_counted_where_it_went(tmp_path):
    """Jumbo frames through both halves of the cable; none of them on the LAN."""
    send = "import socket, sys; socket.socket(2, 2).sendto(bytes(8000), (sys.argv[1], 9))"
    with Lab(tmp_path).sparks(2, "wires") as (one, two):
        for half in range(2):
            address = wires.qsfp_ip(two, half)
            one.run("python", "-c", send, address, log="send", seconds=10)
        lan, qsfp = wires.bytes_moved(two)
        names = [each.run("hostname", log="name", seconds=5).strip() for each in (one, two)]
    assert lan < 4_000 < 16_000 < qsfp < 24_000
    assert names == ["spark1", "spark2"]


def test_nothing_is_left_of_a_killed_run(tmp_path):
    script = (
        "import os, sys, time; from pathlib import Path; from e2e.emulation.lab import Lab\n"
        "with Lab(Path(sys.argv[1])).sparks(2, 'killed') as sparks:\n"
        "    started = sparks[1].start('sleep', '1000', log='sleep', seconds=1000)\n"
        "    print(*(each.pid for each in sparks), started.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)"
    )
    search = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, env=search, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = [int(each) for each in done.stdout.split()]
    deadline = time.monotonic() + 10
    while any(map(_alive, left)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [_alive(each) for each in left] == [False, False, False]


def _alive(pid):
    """Whether it still runs: what nobody has asked for its end yet does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
